"""Attention over vLLM's paged KV cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from opweave import ir


class OpweaveAttentionImpl(CPUAttentionBackendImpl):
    """Decoder attention by opweave's ops; other layers keep vLLM's implementation.

    vLLM's cache has shape ``(blocks, kv_heads, block_size, 2 * head_size)``. This class is the only
    reader and writer of its layer's blocks (vLLM copies whole blocks), so it stores the keys of all
    heads of a block first and then the values, the layout that opweave's kernels accept.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.uses_opweave = (  # reads and writes this layer's cache
            self.attn_type == AttentionType.DECODER
            and not self.is_fp8_kv_cache
            and self.alibi_slopes is None
            and self.sinks is None
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        data = attn_metadata
        if data is None:  # a profiling run
            return output
        if not self.uses_opweave:
            return super().forward(
                layer, query, key, value, kv_cache, data, output, output_scale, output_block_scale
            )
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("opweave_vllm: attention does not support quantized output")
        if data.dynamic_causal is not None:
            raise NotImplementedError(
                "opweave_vllm: attention does not support a causal flag per request; "
                "leave 'attention' out of OPWEAVE_VLLM_SEAMS"
            )
        tokens = data.num_actual_tokens
        keys, values = _split(kv_cache)
        result = ir.ops.paged_attention(
            query[:tokens],
            keys,
            values,
            data.block_table,
            data.seq_lens,
            data.query_start_loc,
            self.scale,
            data.causal,
            None if self.sliding_window < 0 else self.sliding_window,
            self.logits_soft_cap or None,
        )
        output[:tokens].view(result.shape).copy_(result)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the new keys and values; vLLM calls this before :meth:`forward`."""
        if not self.uses_opweave:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        tokens = slot_mapping.shape[0]
        ir.ops.reshape_and_cache.maybe_inplace(
            key[:tokens], value[:tokens], *_split(kv_cache), slot_mapping
        )


class OpweaveAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU attention backend with opweave's implementation."""

    @staticmethod
    def get_impl_cls() -> type[OpweaveAttentionImpl]:
        return OpweaveAttentionImpl


def _split(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return the key cache and the value cache, views of *cache*."""
    blocks, heads, block_size, double = cache.shape
    keys, values = cache.view(blocks, 2, heads, block_size, double // 2).unbind(1)
    return keys, values


def register() -> None:
    """Replace vLLM's CPU attention backend."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.OpweaveAttentionBackend")

"""Provider ``flashinfer``: the CUDA kernels of an installed FlashInfer.

FlashInfer is imported at the first call, and compiles a kernel before it first runs. Only its
functions with the meaning of one of opweave's ops are here. The norms that quantize are left out:
they saturate NaN, which the ops keep.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir import ops, rules
from opweave.ir.ops.arguments import HostLengths, host_lengths
from opweave.ir.ops.mla_attention import absorb, check_decode
from opweave.ir.ops.paged_attention import check_tables
from opweave.ir.rules import ROUNDS_LESS
from opweave.kernels.arguments import NARROW_FLOATS, PLANNABLE, PLANNED, aligned, nvidia
from opweave.kernels.aten.attention import check_lengths, without_library
from opweave.kernels.libraries.shared import HEADS, float32_angles, register_rows, tokens
from opweave.kernels.wrap import ModuleFunction, Support, requires, wrap
from opweave.packages import is_installed

# The kernels are instantiated for 16-bit floats. They copy asynchronously, as Ampere does, and load
# the widest vectors that divide a row, of up to 16 bytes.
_X = nvidia("x", 8, 0) & rules.dtype("x", *NARROW_FLOATS) & rules.contiguous("x") & aligned("x")
_GATED = _X & rules.last_dim_multiple_of("x", 2)


def _rotates_vectors(cos_sin_cache: Tensor, head_size: int) -> bool:
    """Whether both halves of the rotated part consist of the vectors that a thread loads."""
    return cos_sin_cache.shape[1] % (2 * max(8, head_size // 32)) == 0


# Attention over the paged cache, whose layout FlashInfer calls HND, and latent attention (MLA).
#
# A plan serves all layers of a step with the same shapes and options. It covers what FlashInfer
# documents: every query sees a key, and belongs to a sequence. Other batches are left to ``aten``,
# and batches of latent attention that are not decodes to the definition.


_WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation
_HEADS = rules.custom(lambda query: query.shape[2] in (64, 128, 256), "heads are of other sizes")
_MAX_GROUP = 3  # query heads of a key head; for larger groups, tensor cores are faster
LATENT_SIZES = ((512, 64), (256, 64))  # of the latent vector and of the rotated part
# Earlier versions have another signature.
LATENT_METADATA = ModuleFunction("flashinfer.mla._batch_mla._contracts:MLAPlanMetadata")
_TOO_OLD = "FlashInfer lacks MLAPlanMetadata: install flashinfer-python 0.7.2"


def _has_latent_sizes(kv_cache: Tensor, kv_b_weight: Tensor) -> bool:
    latent = kv_b_weight.shape[1]
    return (latent, kv_cache.shape[2] - latent) in LATENT_SIZES


_LATENT = (
    PLANNABLE
    & rules.same_dtype("query", "kv_cache", "kv_b_weight")
    & rules.same_device("query", "kv_cache", "kv_b_weight", "block_tables", "seq_lens")
    & rules.ndim("kv_cache", 3)
    & rules.ndim("kv_b_weight", 2)
    & rules.custom(_has_latent_sizes, f"(latent, rope) is not one of {LATENT_SIZES}")
    & rules.contiguous("kv_cache")
    & aligned("kv_cache")
)


@cache
def _workspace(device: torch.device) -> Tensor:
    """Return memory for intermediate results, which calls on one stream share."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class _Plan:
    """A plan for the layers of a step: for decode if every sequence has one query.

    Attributes:
        wrapper: the wrapper of FlashInfer that has the plan; None for a batch that is left to
            others.
        masks: whether a key is hidden from a query of its sequence.
    """

    wrapper: Any = None

    def __init__(self, tokens: int, layer: Any, block_tables: Tensor, noted: HostLengths) -> None:
        self._tokens, self._layer, self._tables = tokens, layer, block_tables
        self.update(noted)

    @classmethod
    def of(
        cls, query: Tensor, tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *layer: Any
    ) -> _Plan:
        """Return the plan of this step for such layers."""
        noted = host_lengths(seq_lens, cu_seqlens_q)
        assert noted is not None, "the rule requires lengths"
        # A plan keeps the tables, so that no other tensor gets their id.
        layer = query.dtype, query.shape[1], *layer
        if (key := (len(query), layer, id(tables))) not in noted.plans:
            noted.plans[key] = cls(len(query), layer, tables, noted)
        plan: _Plan = noted.plans[key]
        return plan

    def update(self, noted: HostLengths) -> None:
        """Plan for the lengths of a step."""
        dtype, heads, latent, cache, scale, causal, window, cap = self._layer
        blocks, kv_heads, block_size, size = cache
        if noted.is_recorded and window is not None:  # the check for infinities would wait
            return
        device, ints = self._tables.device, partial(torch.tensor, dtype=torch.int32)
        check_lengths(noted.lengths, self._tables.shape[1] * block_size)
        starts, lengths = ints(noted.starts), ints(noted.lengths)
        counts = starts.diff()
        see_keys = (counts > 0) & (counts <= lengths if causal else lengths > 0)
        is_decode = bool((counts == 1).all())
        if noted.starts[-1] != self._tokens or not see_keys.all() or (latent and not is_decode):
            return
        longest = max(noted.lengths)
        self.masks = causal and (not is_decode or (window or longest) < longest)
        pages = (lengths + block_size - 1) // block_size
        ends = functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
        row = torch.arange(len(pages)).repeat_interleave(pages)
        column = torch.arange(len(row)) - ends[:-1].repeat_interleave(pages)
        # Blocks that the cache does not have fail in the second selection.
        used = self._tables[tuple(torch.stack((row, column)).to(device))]
        indices = torch.arange(blocks, dtype=torch.int32, device=device).index_select(0, used)
        if device.type == "cuda":
            # FlashInfer copies a plan from memory that an earlier plan may still be copied from.
            torch.cuda.current_stream(device).synchronize()
        library, workspace = import_module("flashinfer"), _workspace(device)
        options = {"sm_scale": scale, "q_data_type": dtype, "kv_data_type": dtype}
        # Replays read the plan where it was when the launches were recorded.
        sizes = (len(starts), self._tables.numel(), len(lengths)) if noted.is_recorded else ()
        buffers = (torch.zeros(n, dtype=torch.int32, device=device) for n in sizes)
        if latent:
            if self.wrapper is None:
                # The others cannot plan again for recorded launches, or need cleared memory.
                backend = "fa3" if library.utils.is_sm90a_supported(device) else "fa2"
                queries = (starts.to(device),) if noted.is_recorded else ()
                self.wrapper = library.mla.BatchMLAPagedAttentionWrapper(
                    workspace, noted.is_recorded, *queries, *buffers, backend=backend
                )
            self.wrapper.plan(
                metadata=library.mla.MLAPlanMetadata.csr(starts, ends, indices, lengths),
                num_heads=heads, head_dim_ckv=latent, head_dim_kpe=size - latent,
                page_size=block_size, causal=False, **options,
            )  # fmt: skip
            return
        if self.wrapper is None and is_decode:
            use_tensor_cores = heads // kv_heads > _MAX_GROUP
            self.wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "HND", noted.is_recorded, use_tensor_cores, *buffers
            )
        elif self.wrapper is None:
            self.wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        queries, more = ((), {}) if is_decode else ((starts,), {"causal": causal})
        self.wrapper.plan(
            *queries, ends, indices, (lengths - 1) % block_size + 1,
            heads, kv_heads, size, block_size, **more,
            window_left=-1 if window is None else window - 1, logits_soft_cap=cap, **options,
        )  # fmt: skip


def _paged_attention(*arguments: Any) -> Tensor:
    query, key_cache, value_cache, *sequences = arguments[:6]
    plan = _Plan.of(query, *sequences, 0, tuple(key_cache.shape), *arguments[6:])
    if plan.wrapper is not None:
        out: Tensor = plan.wrapper.run(query, (key_cache, value_cache))
        # The kernels multiply the values of masked keys by zero: NaN and infinity spread.
        if not plan.masks or out.isfinite().all():
            return out
    return without_library(*arguments)


def _mla_attention_decode(*arguments: Any) -> Tensor:
    query, kv_cache, kv_b_weight, *sequences, scale = arguments
    sizes = check_decode(query, kv_cache, kv_b_weight)
    check_tables(*sequences)
    layer = kv_b_weight.shape[1], tuple(kv_cache[:, None].shape)
    options = query.shape[2] ** -0.5 if scale is None else scale, False, None, None
    plan = _Plan.of(query, *sequences, *layer, *options)
    if plan.wrapper is None:
        out: Tensor = ops.mla_attention_decode.native(*arguments)
        return out
    queries, w_uv = absorb(query, kv_b_weight, sizes)
    attended = plan.wrapper.run(query=queries, kv_cache=kv_cache)
    return torch.einsum("tnl,nvl->tnv", attended, w_uv).contiguous()


if is_installed("flashinfer"):
    register = partial(wrap, provider="flashinfer", traits={ROUNDS_LESS}, **requires())
    register_rows(register, "flashinfer.norm", "flashinfer.activation", _X, _GATED, 2, 3)
    # Heads of other sizes go through a kernel for quantized caches.
    register(
        ops.rotary_embedding,
        function="flashinfer.rope:apply_rope_with_cos_sin_cache",
        arguments=[tokens, "x_query", "x_key", "head_size", float32_angles, "is_neox_style"],
        supports_args=nvidia("x_query", 8, 0)
        & rules.dtype("x_query", *NARROW_FLOATS)
        & HEADS
        & aligned("x_query", "x_key")
        & rules.one_of("head_size", 64, 128, 256, 512)
        & rules.custom(_rotates_vectors, "the rotated part is not made of whole vectors"),
    )
    register(
        ops.paged_attention,
        function=_paged_attention,
        arguments=ops.paged_attention.schema.names,
        supports_args=PLANNED & _HEADS,
        traits=(),
    )
    too_old: Support = {"supported": False, "unsupported_reason": _TOO_OLD}
    register(
        ops.mla_attention_decode,
        function=_mla_attention_decode,
        arguments=ops.mla_attention_decode.schema.names,
        supports_args=_LATENT,
        traits=(),
        **(requires() if LATENT_METADATA.file() else too_old),
    )

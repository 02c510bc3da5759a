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
from opweave.ir.rules import ROUNDS_LESS
from opweave.kernels.arguments import NARROW_FLOATS, PLANNED, aligned, nvidia, residual, row
from opweave.kernels.aten.attention import check_lengths, without_library
from opweave.kernels.libraries.rotary_arguments import HEADS, float32_angles, tokens
from opweave.kernels.wrap import FunctionByArgument, Output, requires, wrap
from opweave.packages import is_installed

# The kernels are instantiated for 16-bit floats. They copy asynchronously, as Ampere does, and load
# the widest vectors that divide a row, of up to 16 bytes.
_X = nvidia("x", 8, 0) & rules.dtype("x", *NARROW_FLOATS) & rules.contiguous("x") & aligned("x")
# The weight is read with the dtype of x.
_NORM = (
    _X
    & rules.is_none("variance_size")
    & row("weight")
    & rules.same_dtype("x", "weight")
    & aligned("weight")
)
_GATED = _X & rules.last_dim_multiple_of("x", 2)
_GELUS: dict[object, str] = {
    "none": "flashinfer.activation:gelu_and_mul",
    "tanh": "flashinfer.activation:gelu_tanh_and_mul",
}


def _rotates_vectors(cos_sin_cache: Tensor, head_size: int) -> bool:
    """Whether both halves of the rotated part consist of the vectors that a thread loads."""
    return cos_sin_cache.shape[1] % (2 * max(8, head_size // 32)) == 0


# Attention over the paged cache, whose layout FlashInfer calls HND.
#
# A plan serves all layers of a step with the same shapes and options. It covers what FlashInfer
# documents: every query sees a key, and belongs to a sequence. Other batches are left to ``aten``.


_WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation
_HEADS = rules.custom(lambda query: query.shape[2] in (64, 128, 256), "heads are of other sizes")
_MAX_GROUP = 3  # query heads of a key head; for larger groups, tensor cores are faster


@cache
def _workspace(device: torch.device) -> Tensor:
    """Return memory for intermediate results, which calls on one stream share."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class _Plan:
    """A plan for the layers of a step: for decode if every sequence has one query.

    Attributes:
        wrapper: the wrapper of FlashInfer that has the plan; None for a batch that is left to
            ``aten``.
        masks: whether a key is hidden from a query of its sequence.
    """

    wrapper: Any = None

    def __init__(self, tokens: int, layer: Any, block_tables: Tensor, noted: HostLengths) -> None:
        self._tokens, self._layer, self._tables = tokens, layer, block_tables
        self.update(noted)

    def update(self, noted: HostLengths) -> None:
        """Plan for the lengths of a step."""
        dtype, heads, (blocks, kv_heads, block_size, size), scale, causal, window, cap = self._layer
        if noted.is_recorded and window is not None:  # the check for infinities would wait
            return
        device, ints = self._tables.device, partial(torch.tensor, dtype=torch.int32)
        check_lengths(noted.lengths, self._tables.shape[1] * block_size)
        starts, lengths = ints(noted.starts), ints(noted.lengths)
        counts = starts.diff()
        see_keys = (counts > 0) & (counts <= lengths if causal else lengths > 0)
        if noted.starts[-1] != self._tokens or not see_keys.all():
            return
        is_decode, longest = bool((counts == 1).all()), max(noted.lengths)
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
        library, common = import_module("flashinfer"), (_workspace(device), "HND")
        if self.wrapper is None and is_decode:
            # Replays read the plan where it was when the launches were recorded.
            sizes = (len(starts), self._tables.numel(), len(lengths)) if noted.is_recorded else ()
            buffers = (torch.zeros(n, dtype=torch.int32, device=device) for n in sizes)
            use_tensor_cores = heads // kv_heads > _MAX_GROUP
            self.wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
                *common, noted.is_recorded, use_tensor_cores, *buffers
            )
        elif self.wrapper is None:
            self.wrapper = library.BatchPrefillWithPagedKVCacheWrapper(*common)
        queries, more = ((), {}) if is_decode else ((starts,), {"causal": causal})
        self.wrapper.plan(
            *queries, ends, indices, (lengths - 1) % block_size + 1,
            heads, kv_heads, size, block_size, **more,
            window_left=-1 if window is None else window - 1, logits_soft_cap=cap,
            sm_scale=scale, q_data_type=dtype, kv_data_type=dtype,
        )  # fmt: skip


def _paged_attention(*arguments: Any) -> Tensor:
    query, key_cache, value_cache, tables, seq_lens, cu_seqlens_q, *options = arguments
    noted = host_lengths(seq_lens, cu_seqlens_q)
    assert noted is not None, "the rule requires lengths"
    layer = query.dtype, query.shape[1], tuple(key_cache.shape), *options
    # A plan keeps the tables, so that no other tensor gets their id.
    if (key := (len(query), layer, id(tables))) not in noted.plans:
        noted.plans[key] = _Plan(len(query), layer, tables, noted)
    plan: _Plan = noted.plans[key]
    if plan.wrapper is not None:
        out: Tensor = plan.wrapper.run(query, (key_cache, value_cache))
        # The kernels multiply the values of masked keys by zero: NaN and infinity spread.
        if not plan.masks or out.isfinite().all():
            return out
    return without_library(*arguments)


if is_installed("flashinfer"):
    register = partial(wrap, provider="flashinfer", traits={ROUNDS_LESS}, **requires())
    register(
        ops.rms_norm,
        function="flashinfer.norm:rmsnorm",
        arguments=["x", "weight", "epsilon"],
        supports_args=_NORM & rules.ndim("x", 2, 3),
    )
    register(
        ops.fused_add_rms_norm,
        function="flashinfer.norm:fused_add_rmsnorm",
        arguments=[Output("x"), Output("x_residual"), "weight", "epsilon"],
        supports_args=_NORM & rules.ndim("x", 2) & residual("x_residual"),
    )
    register(
        ops.silu_and_mul,
        function="flashinfer.activation:silu_and_mul",
        arguments=["x"],
        supports_args=_GATED,
    )
    register(
        ops.gelu_and_mul,
        function=FunctionByArgument("approximate", _GELUS),
        arguments=["x"],
        supports_args=_GATED & rules.one_of("approximate", "none", "tanh"),
    )
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

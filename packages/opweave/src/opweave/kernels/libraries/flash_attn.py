"""Provider ``flash_attn``: the CUDA kernels of an installed FlashAttention 2 (flash-attn).

The library is imported at the first call. Packed attention with a causal mask is left out: the
kernel multiplies the values of masked keys by zero, which makes NaN of infinity, and the op ignores
them. Over the paged cache, it computes batches of decodes without a window, in which no key is
masked, and leaves others to ``aten``. It does not check the numbers of blocks.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir import ops, rules
from opweave.ir.ops.arguments import host_lengths
from opweave.ir.rules import Rule
from opweave.kernels.arguments import NARROW_FLOATS, PLANNED, POSITIVE_SCALE, nvidia
from opweave.kernels.aten.attention import aligned, without_library
from opweave.kernels.wrap import ModuleFunction, requires, wrap
from opweave.packages import is_installed

_MAX_HEAD_SIZE = 256


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return (
        query.ndim == key.ndim == value.ndim
        and key.shape == value.shape
        and query.shape[:-3] == key.shape[:-3]
        and query.shape[-1] == key.shape[-1] <= _MAX_HEAD_SIZE
        and 0 not in key.shape[-2:]
        and query.shape[-2] % key.shape[-2] == 0
    )


def _are_boundaries(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> bool:
    return cu_seqlens_q.shape == cu_seqlens_k.shape and cu_seqlens_q.numel() > 0


def _attention(ndim: int) -> Rule:
    return (
        nvidia("query", 8, 0)
        & rules.ndim("query", ndim)
        & rules.dtype("query", *NARROW_FLOATS)
        & rules.same_dtype("query", "key", "value")
        & rules.same_device("query", "key", "value")
        & rules.contiguous("query")
        # Heads of other sizes are padded, and the results are not contiguous.
        & rules.last_dim_multiple_of("query", 8)
        & POSITIVE_SCALE
        & rules.custom(
            _fits, f"the shapes do not fit, or the heads have more than {_MAX_HEAD_SIZE} elements"
        )
    )


_CAPPED = rules.custom(lambda soft_cap: soft_cap is None or soft_cap > 0, "soft_cap is not above 0")


def _window_size(window: int | None) -> tuple[int, int]:
    """Return the numbers of visible keys before and after a query; -1 for all."""
    return (-1, -1) if window is None else (window - 1, 0)


def _soft_cap(soft_cap: float | None) -> float:
    return soft_cap or 0.0


# A last sequence with the tokens that belong to none, and without keys, has zeros as results.
def _query_boundaries(query: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    return functional.pad(cu_seqlens_q, (0, 1), value=len(query)).int()


_TENSORS = {
    "q": lambda query: aligned(t=query),
    "k": lambda key: aligned(t=key),
    "v": lambda value: aligned(t=value),
    "softmax_scale": "scale",
}

# Attention over the paged cache.


_BLOCK_MULTIPLE = 256  # positions of a block
DECODE = ModuleFunction("flash_attn.flash_attn_interface:flash_attn_with_kvcache")
_decode = cache(DECODE.load)


def _paged_attention(*arguments: Any) -> Tensor:
    query, *caches, tables, seq_lens, cu_seqlens_q, scale, _, window, soft_cap = arguments
    noted = host_lengths(seq_lens, cu_seqlens_q)
    assert noted is not None, "the rule requires lengths"
    if window is not None or [*noted.starts] != [*range(len(query) + 1)]:
        return without_library(*arguments)
    out: Tensor = _decode()(
        query[:, None], *(cache.transpose(1, 2) for cache in caches), cache_seqlens=seq_lens,
        block_table=tables, softmax_scale=scale, softcap=_soft_cap(soft_cap),
    )  # fmt: skip
    return out[:, 0]


def _blocks_fit(key_cache: Tensor) -> bool:
    return key_cache.shape[2] % _BLOCK_MULTIPLE == 0 and key_cache.shape[3] <= _MAX_HEAD_SIZE


_BLOCKS_REASON = f"block_size is not a multiple of {_BLOCK_MULTIPLE}, or heads are too large"

if is_installed("flash_attn"):
    register = partial(wrap, provider="flash_attn", **requires())
    register(
        ops.paged_attention,
        function=_paged_attention,
        arguments=ops.paged_attention.schema.names,
        supports_args=PLANNED
        & rules.last_dim_multiple_of("query", 8)
        & rules.custom(_blocks_fit, _BLOCKS_REASON),
    )
    register(
        ops.causal_attention,
        function="flash_attn.flash_attn_interface:flash_attn_func",
        arguments={**_TENSORS, "causal": True, "window_size": _window_size, "softcap": _soft_cap},
        supports_args=_attention(4)
        & _CAPPED
        & rules.custom(lambda window: window is None or window > 0, "window is not positive"),
    )
    register(
        ops.bidirectional_attention,
        function="flash_attn.flash_attn_interface:flash_attn_func",
        arguments=_TENSORS,
        supports_args=_attention(4),
    )
    register(
        ops.varlen_attention,
        function="flash_attn.flash_attn_interface:flash_attn_varlen_func",
        arguments={
            **_TENSORS,
            "cu_seqlens_q": _query_boundaries,
            "cu_seqlens_k": lambda cu_seqlens_k: torch.cat((cu_seqlens_k, cu_seqlens_k[-1:])).int(),
            # Reading the longest length would wait for the GPU, so the number of all tokens is the
            # bound. With 1, the kernel expects a token in each sequence.
            "max_seqlen_q": lambda query: max(len(query), 2),
            "max_seqlen_k": lambda key: key.shape[0],
            "softcap": _soft_cap,
        },
        supports_args=_attention(3)
        & _CAPPED
        & rules.one_of("causal", False)
        & rules.is_none("window")
        & rules.same_device("query", "cu_seqlens_q", "cu_seqlens_k")
        & rules.ndim("cu_seqlens_q", 1)
        & rules.dtype("cu_seqlens_q", torch.int32, torch.int64)
        & rules.dtype("cu_seqlens_k", torch.int32, torch.int64)
        & rules.custom(_are_boundaries, "the numbers of sequences differ or there is no boundary"),
    )

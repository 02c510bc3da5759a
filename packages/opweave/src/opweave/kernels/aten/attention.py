"""Attention with ``scaled_dot_product_attention``, also over the paged cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from opweave import plain_call, torch_compat
from opweave.ir import ops, rules
from opweave.ir.ops.arguments import host_lengths
from opweave.ir.ops.attention import check_attention, check_varlen
from opweave.ir.rules import DIFFERENTIABLE
from opweave.ir.selection import needs_gradient
from opweave.kernels.arguments import ATTENDS, attention_fits

# Memory alignment of arguments for torch's CUDA kernels.


_ALIGNMENT = 16  # bytes per vectorized load


def aligned(t: Tensor) -> Tensor:
    """Return *t*, or a copy if it is on CUDA and a row is not aligned to 16 bytes.

    torch's attention does not check the alignment, and returns wrong results without it.
    ``rms_norm`` falls back to a kernel that turns a row with an infinity into NaN.
    """
    if not t.is_cuda:
        return t
    count = _ALIGNMENT // t.itemsize
    places = (t.storage_offset(), *t.stride()[:-1])
    return t.clone(memory_format=torch.contiguous_format) if any(p % count for p in places) else t


# Attention with ``torch.nn.functional.scaled_dot_product_attention``.
#
# torch has no forward-mode derivatives and no batching rules for its fused kernels, and cannot
# trace them for data-dependent sizes. Such calls run the definition.


# torch requires one dtype; native promotes.
_ONE_DTYPE = rules.same_dtype("query", "key", "value")
_NO_SOFT_CAP = _ONE_DTYPE & rules.is_none("soft_cap")


def _is_readable(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor) -> bool:
    """Whether lengths may be read: tracers see the operators of calls that need a gradient."""
    is_traced = type(cu_seqlens_q) not in plain_call.PLAIN_TYPES or plain_call.hides_values()
    return not (is_traced and needs_gradient((query, key, value)))


@ops.bidirectional_attention.register_impl("aten", supports_args=_ONE_DTYPE, traits=DIFFERENTIABLE)
def bidirectional_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None
) -> Tensor:
    check_attention(query, key, value, False, None, "bidirectional_attention")
    return attend(query, key, value, scale, False, None).contiguous()


@ops.causal_attention.register_impl("aten", supports_args=_NO_SOFT_CAP, traits=DIFFERENTIABLE)
def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    check_attention(query, key, value, True, window, "causal_attention")
    return attend(query, key, value, scale, True, window).contiguous()


@ops.varlen_attention.register_impl(
    "aten",
    supports_args=_NO_SOFT_CAP
    & rules.has_values("cu_seqlens_q", "cu_seqlens_k")
    & rules.custom(_is_readable, "the call is traced and needs a gradient"),
    traits=DIFFERENTIABLE,
)
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, causal, window)
    queries = _sequences(query, cu_seqlens_q)
    keys, values = (_sequences(t, cu_seqlens_k) for t in (key, value))
    *sequences, (rest, k, v) = zip(queries, keys, values, strict=True)
    sequences.append((rest, k[:, :0], v[:, :0]))  # queries of no sequence have no keys
    sequences = [s for s in sequences if s[0].shape[1]] or sequences[-1:]
    parts = [attend(*sequence, scale, causal, window) for sequence in sequences]
    out = torch.cat(parts, 1)[0]
    if causal and not out.isfinite().all():
        # torch multiplies the values of masked keys by zero, so NaN and infinity spread from them;
        # native ignores masked keys.
        for i, sequence in enumerate(sequences):
            if not parts[i].isfinite().all():
                parts[i] = ops.causal_attention.native(*sequence, scale, window)
        out = torch.cat(parts, 1)[0]
    return out.contiguous()


def _sequences(packed: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of each sequence, and of no sequence, with a dimension for the batch."""
    bounds: list[int] = [*cu_seqlens.tolist(), packed.shape[0]]
    return torch.split(packed[None], [end - start for start, end in pairwise(bounds)], 1)


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool, window: int | None
) -> Tensor:
    """Return attention for ``(batch, length, heads, size)``; zeros for queries without a key."""
    batch, q_len, k_len = *query.shape[:2], key.shape[1]
    if plain_call.is_transformed() or None in map(torch_compat.size_hint, (batch, q_len, k_len)):
        options = (scale, window) if causal else (scale,)
        op = ops.causal_attention if causal else ops.bidirectional_attention
        exact: Tensor = op.native(query, key, value, *options)
        return exact
    blind = max(q_len - k_len, 0) if causal or k_len == 0 else 0
    if blind:  # with them, gradients would be NaN
        query = query[:, blind:]
    mask = _mask(query, k_len, scale, window) if causal else None
    scale, value_size = query.shape[-1] ** -0.5 if scale is None else scale, value.shape[-1]
    if query.is_cuda:
        # torch 2.11 crashes on an H100 if keys and values have different head sizes.
        widest = max(query.shape[-1], value_size)
        query, key, value = (aligned(_widened(t, widest)) for t in (query, key, value))
    out = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=bool(causal and mask is None and q_len - blind > 1),  # sizes may be symbols
        scale=scale,
        enable_gqa=bool(query.shape[2] != key.shape[2]),
    ).transpose(1, 2)[..., :value_size]
    return functional.pad(out, (0, 0, 0, 0, blind, 0)) if blind else out


def _widened(t: Tensor, size: int) -> Tensor:
    missing = size - t.shape[-1]
    return functional.pad(t, (0, missing)) if missing else t


def _mask(query: Tensor, k_len: int, scale: float | None, window: int | None) -> Tensor | None:
    """Return an additive mask, or None if torch's own top-left mask, or no mask, is enough.

    A bool mask is not safe: cuDNN's kernel replaces it with a finite number that the score of a
    masked key may exceed.
    """
    q_len, narrow = query.shape[1], window is not None and window < k_len
    # torch scales after its own mask: a scale of 0 or less would change minus infinity.
    own_is_enough = q_len == k_len and (scale is None or scale > 0)
    if not narrow and (q_len == 1 or own_is_enough):
        return None
    q_pos = torch.arange(k_len - q_len, k_len, device=query.device)[:, None]
    distance = q_pos - torch.arange(k_len, device=query.device)
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    return query.new_zeros(q_len, k_len).masked_fill(hidden, -math.inf)


# Attention over the paged cache, with prompts by ``scaled_dot_product_attention``.
#
# Gathering the keys of a long prompt is cheap compared with its attention, for which torch has
# faster kernels than a paged one. Short sequences share one call of a paged kernel. If the lengths
# are not noted, reading them waits for the device, and so does the check for infinities, so the
# implementation cannot be traced or recorded; batches in which every sequence has one query never
# wait.


_Caches = tuple[Tensor, Tensor]
_SHAPES_REASON = "shapes do not fit, or window is not positive"


class _Prompt(NamedTuple):
    """A sequence with many queries.

    Attributes:
        number: its index in the batch.
        queries: the rows of its queries.
        length: the number of its keys.
    """

    number: int
    queries: slice
    length: int


@ops.paged_attention.register_impl(
    "aten",
    supports_args=ATTENDS
    & rules.has_values("seq_lens", "cu_seqlens_q")
    & rules.is_none("soft_cap")
    & rules.custom(attention_fits, _SHAPES_REASON),
    tunable={"prompt": (1, 128, 1024)},
)
def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
    cu_seqlens_q: Tensor, scale: float | None = None, causal: bool = True,
    window: int | None = None, soft_cap: float | None = None, *, prompt: int = 128,
) -> Tensor:  # fmt: skip
    """Return the attention of each query over the keys of its sequence.

    Args:
        prompt: the fewest queries of a sequence for which its keys are gathered.
    """
    caches, options = (key_cache, value_cache), (scale, causal, window)
    tokens, sequences = query.shape[0], block_tables.shape[0]
    if tokens < prompt or tokens <= sequences:
        return _paged(query, caches, block_tables, seq_lens, cu_seqlens_q, *options)
    if (noted := host_lengths(seq_lens, cu_seqlens_q)) is not None:
        starts, lengths = noted.starts, noted.lengths
    else:
        numbers: list[int] = torch.cat((cu_seqlens_q, seq_lens)).tolist()
        starts, lengths = numbers[: sequences + 1], numbers[sequences + 1 :]
    check_lengths(lengths, block_tables.shape[1] * key_cache.shape[2])
    out = query.new_zeros(tokens, query.shape[1], value_cache.shape[3])
    prompts, short = [], []
    for i, length in enumerate(lengths):
        count = starts[i + 1] - starts[i]
        if count >= prompt:
            prompts.append(_Prompt(i, slice(starts[i], starts[i + 1]), length))
        elif count:
            short.append(i)
    for sequence in prompts:
        keys, values = _gathered(caches, block_tables, sequence)
        out[sequence.queries] = attend(query[None, sequence.queries], keys, values, *options)[0]
    if causal and not out.isfinite().all():
        # torch multiplies the values of masked keys by zero, so NaN and infinity spread from them.
        for sequence in prompts:
            if not out[sequence.queries].isfinite().all():
                keys, values = _gathered(caches, block_tables, sequence)
                packed = query[None, sequence.queries], keys, values
                out[sequence.queries] = ops.causal_attention.native(*packed, scale, window)[0]
    if short:
        rows = torch.tensor(
            [row for i in short for row in range(starts[i], starts[i + 1])], device=query.device
        )
        chosen = torch.tensor(short, device=query.device)
        counts = cu_seqlens_q.diff()[chosen]
        bounds = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        rest = block_tables[chosen], seq_lens[chosen], bounds
        out[rows] = _paged(query[rows], caches, *rest, *options)
    return out


def _paged(query: Tensor, caches: _Caches, *rest: Any) -> Tensor:
    """Compute attention with a kernel that reads the cache in place."""
    out: Tensor = ops.paged_attention.using("triton", "opweave_c", "native")(query, *caches, *rest)
    return out


def without_library(*arguments: Any) -> Tensor:
    """Compute attention, given the arguments of the op, with kernels that need no lengths."""
    out: Tensor = ops.paged_attention.using("aten", "triton", "native")(*arguments)
    return out


def _gathered(caches: _Caches, block_tables: Tensor, prompt: _Prompt) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a sequence, ``(1, length, heads, size)``."""
    blocks = -(-prompt.length // caches[0].shape[2])
    table = block_tables[prompt.number, :blocks]
    # By heads, as torch's kernels read them: gathering is then the only copy.
    keys, values = (
        cache.transpose(0, 1).index_select(1, table).flatten(1, 2)[:, : prompt.length]
        for cache in caches
    )
    return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def check_lengths(lengths: Sequence[int], most: int) -> None:
    """Raise IndexError unless each sequence of a paged cache has 0 to *most* keys."""
    for i, length in enumerate(lengths):
        if not 0 <= length <= most:
            raise IndexError(
                f"paged_attention: seq_lens[{i}] is {length}; block_tables has room for 0 to {most}"
            )

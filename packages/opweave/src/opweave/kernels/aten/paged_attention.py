"""Attention over the paged cache, with prompts by ``scaled_dot_product_attention``.

Gathering the keys of a long prompt is cheap compared with its attention, for which torch has faster
kernels than a paged one. Short sequences share one call of a paged kernel. The lengths are read on
the host, which waits for the device, so the implementation cannot be traced or recorded; batches in
which every sequence has one query never wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.kernels.aten.attention import attend
from opweave.kernels.paged import ATTENDS, attention_fits

_WHY = "shapes do not fit, or window is not positive"


class _AttentionOptions(NamedTuple):
    """The options of the op after the tensors."""

    scale: float | None
    causal: bool
    window: int | None


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
    & rules.custom(attention_fits, _WHY),
    tunable={"prompt": (1, 128, 1024)},
)
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    *,
    prompt: int = 128,
) -> Tensor:
    """Return the attention of each query over the keys of its sequence.

    Args:
        prompt: the fewest queries of a sequence for which its keys are gathered.
    """
    caches, options = (key_cache, value_cache), _AttentionOptions(scale, causal, window)
    tokens, sequences = query.shape[0], block_tables.shape[0]
    if tokens < prompt or tokens <= sequences:
        return _paged(query, caches, block_tables, seq_lens, cu_seqlens_q, options)
    numbers: list[int] = torch.cat((cu_seqlens_q, seq_lens)).tolist()
    starts, lengths = numbers[: sequences + 1], numbers[sequences + 1 :]
    _check_lengths(lengths, block_tables.shape[1] * key_cache.shape[2])
    out = query.new_zeros(tokens, query.shape[1], value_cache.shape[3])
    prompts, short = [], []
    for i, length in enumerate(lengths):
        count = starts[i + 1] - starts[i]
        if count >= prompt:
            prompts.append(_Prompt(i, slice(starts[i], starts[i + 1]), length))
        elif count:
            short.append(i)
    for each in prompts:
        keys, values = _gathered(caches, block_tables, each)
        out[each.queries] = attend(query[None, each.queries], keys, values, *options)[0]
    if causal and not out.isfinite().all():
        _mend(out, query, caches, block_tables, prompts, options)
    if short:
        rows = torch.tensor(
            [row for i in short for row in range(starts[i], starts[i + 1])], device=query.device
        )
        chosen = torch.tensor(short, device=query.device)
        counts = cu_seqlens_q.diff()[chosen]
        bounds = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        out[rows] = _paged(
            query[rows], caches, block_tables[chosen], seq_lens[chosen], bounds, options
        )
    return out


def _paged(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    options: _AttentionOptions,
) -> Tensor:
    """Compute attention with a kernel that reads the cache in place."""
    found: Tensor = ops.paged_attention.using("triton", "opweave_c", "native")(
        query, *caches, block_tables, seq_lens, cu_seqlens_q, *options
    )
    return found


def _gathered(
    caches: tuple[Tensor, Tensor], block_tables: Tensor, prompt: _Prompt
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a sequence, ``(1, length, heads, size)``."""
    blocks = -(-prompt.length // caches[0].shape[2])
    table = block_tables[prompt.number, :blocks]
    # By heads, as torch's kernels read them: gathering is then the only copy.
    keys, values = (
        cache.transpose(0, 1).index_select(1, table).flatten(1, 2)[:, : prompt.length]
        for cache in caches
    )
    return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def _mend(
    out: Tensor,
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    block_tables: Tensor,
    prompts: Sequence[_Prompt],
    options: _AttentionOptions,
) -> None:
    """Compute prompts with infinities or NaN by the definition.

    torch multiplies the values of masked keys by zero, so that NaN and infinity spread from them.
    """
    for each in prompts:
        if not out[each.queries].isfinite().all():
            keys, values = _gathered(caches, block_tables, each)
            out[each.queries] = ops.causal_attention.native(
                query[None, each.queries], keys, values, options.scale, options.window
            )[0]


def _check_lengths(lengths: Sequence[int], most: int) -> None:
    for i, length in enumerate(lengths):
        if not 0 <= length <= most:
            raise IndexError(
                f"paged_attention: seq_lens[{i}] is {length}; block_tables has room for 0 to {most}"
            )

"""The chunked scan of Mamba-2, a selective state-space model with one decay rate per head.

Within a chunk the scan is a matrix product; between chunks it is a recurrence of their states.

Source: Dao and Gu, "Transformers are SSMs", arXiv:2405.21060, section 6.
"""

from typing import Any

import torch
from torch import Tensor

from opweave.ir.ops import arguments
from opweave.ir.ops.attention import locate
from opweave.ir.ops.state_space import (
    check_scan,
    finish,
    linear_recurrence,
    one_before,
    register_scan_fake,
    scan_inputs,
    time_step,
)
from opweave.ir.registry import register_op


@register_op(allow_inplace=True, autocast=False)
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    x_state: Tensor,
    query_start_loc: Tensor,
    slot_idx: Tensor,
    has_initial_state: Tensor,
    chunk_size: int = 256,
    dt_softplus: bool = True,
    dt_min: float | None = None,
    dt_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan packed sequences of heads: ``h = exp(dt a) h + dt x bᵀ``, ``y = h c + d x``.

    ``dt`` is ``softplus(dt + dt_bias)`` with *dt_softplus*, clamped to its limits; with *z*, the
    result is ``y silu(z)``. A sequence starts from the state in its slot if it
    *has_initial_state*, else from zeros. Computed in float32 (float64 stays), rounded once. Tokens
    after the last sequence and of sequences with slot -1 give zeros. Sequences must not share a
    slot. The chunk size affects only the order of sums. Non-finite values affect only later tokens
    of their own sequence.

    Args:
        x: ``(tokens, heads, head_size)``, floating point.
        dt: ``(tokens, heads)``: the time step of each head.
        a: ``(heads,)``, negative.
        b, c: ``(tokens, groups, N)`` where consecutive heads share a group, or ``(tokens, N)``.
        d: ``(heads,)`` or None.
        z: the gate, the shape of ``x``, or None.
        dt_bias: ``(heads,)`` or None.
        x_state: ``(slots, heads, head_size, N)``, any floating dtype; float32 recommended.
        query_start_loc: ``(sequences + 1,)``, integer, non-decreasing, from 0.
        slot_idx: ``(sequences,)``, integer: the slot of each sequence; -1 for padding.
        has_initial_state: ``(sequences,)``, bool.
        chunk_size: number of tokens of a sequence per chunk.
        dt_softplus: apply softplus to the time step.
        dt_min, dt_max: limits of the time step, or None.

    Returns:
        The result in the shape and dtype of ``x``, and the updated ``x_state``.

    Raises:
        ValueError: shapes or dtypes do not fit, or *chunk_size* is not positive.
        IndexError: a slot does not exist.
    """
    check_scan("ssd_chunk_scan", x, dt, a, b, c, d, z, dt_bias, x_state, chunk_size)
    arguments.check_sequences("ssd_chunk_scan", query_start_loc, slot_idx, has_initial_state)
    dtype = torch.promote_types(x.dtype, torch.float32)
    sequence, position = locate(x.shape[0], query_start_loc)
    initial = arguments.initial_states(x_state, slot_idx, has_initial_state).to(dtype)
    step = time_step(dt, dt_bias, dt_softplus, dt_min, dt_max, dtype)
    chunks = _Chunks(query_start_loc, x.shape[0], chunk_size)
    place = chunks.first[sequence] * chunk_size + position
    parts = (step * a.to(dtype), x.to(dtype) * step[..., None], grouped(b), grouped(c))
    decay, inputs, keys, queries = (chunks.pack(t.to(dtype), place) for t in parts)
    y, ends, total = scan_chunks(decay, inputs, keys, queries)
    # The state entering a chunk is the one that leaves the previous chunk, or the initial state.
    first, some = chunks.first[:-1].long(), (query_start_loc.diff() > 0)[:, None, None, None]
    begins = torch.zeros_like(total[:, 0], dtype=torch.bool).index_fill(0, first, True)
    begins = begins[:, None, None, None]
    gate = one_before(torch.exp(total))[..., None, None]
    value = torch.where(begins, 0, one_before(ends))
    # An empty sequence shares the index of the next one's first chunk, and adds zeros there.
    value = value.index_add(0, first, torch.where(some, initial, 0))
    enter = linear_recurrence(gate, value, begins)
    y = y + read_out(enter, queries, decay)
    ended = torch.exp(total)[..., None, None] * enter + ends
    last = torch.where(some, ended[(chunks.first[1:] - 1).clamp(min=0).long()], initial)
    y = finish(y.flatten(0, 1)[place], x, None if d is None else d[:, None], z)
    y = torch.where(arguments.is_computed(sequence, slot_idx)[:, None, None], y, 0)
    return y.to(x.dtype).contiguous(), arguments.write_states(x_state, slot_idx, last)


class _Chunks:
    """The division of packed sequences into chunks that never span two sequences.

    Allocates the maximum number of chunks, since the actual number depends on data. The last chunk
    is for tokens after the last sequence, and the first chunk of empty sequences at the end.
    """

    def __init__(self, query_start_loc: Tensor, tokens: int, size: int) -> None:
        counts = (query_start_loc.diff() + size - 1) // size
        before = torch.cat((query_start_loc.new_zeros(1), counts.cumsum(0)))
        self.first = before  # the first chunk of each sequence, and the number of all chunks
        self.size = size
        # Tokens after the last sequence need chunks too.
        self.number = tokens // size + query_start_loc.shape[0] + 1

    def pack(self, t: Tensor, place: Tensor) -> Tensor:
        """Return ``(chunks, size, ...)`` with the tokens at their places, padded with zeros."""
        room = t.new_zeros(self.number * self.size, *t.shape[1:])
        return torch.unflatten(room.index_copy(0, place, t), 0, (self.number, self.size))


def scan_chunks(
    decay: Tensor, inputs: Tensor, keys: Tensor, queries: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scan each chunk separately, starting from zeros.

    Args:
        decay: ``dt a``, ``(chunks, size, heads)``.
        inputs: ``dt x``, ``(chunks, size, heads, head_size)``.
        keys, queries: ``b`` and ``c``, ``(chunks, size, groups, N)``.

    Returns:
        The results, like *inputs*; the final states, ``(chunks, heads, head_size, N)``; and the
        logarithm of the decay over each chunk, ``(chunks, heads)``.
    """
    size, heads = decay.shape[1:]
    share = heads // keys.shape[2]
    passed = decay.cumsum(1).transpose(1, 2)  # (chunks, heads, size)
    later = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1)
    # Masked before the exponential, which could overflow above the diagonal.
    decays = (passed[..., :, None] - passed[..., None, :]).masked_fill(later, float("-inf")).exp()
    scores = queries.transpose(1, 2) @ keys.permute(0, 2, 3, 1)  # (chunks, groups, size, size)
    weights = decays * scores.masked_fill(later, 0).repeat_interleave(share, dim=1)
    values = inputs.transpose(1, 2)  # (chunks, heads, size, head_size)
    # 0 * NaN is NaN, so non-finite inputs are left out of the product; adding x - x (NaN for them,
    # else 0), summed over tokens, makes the later results NaN.
    spoilt = (inputs - inputs).detach().cumsum(1)
    y = (weights @ values.nan_to_num(0, 0, 0)).transpose(1, 2) + spoilt
    total = passed[..., -1]
    left = torch.exp(total[..., None] - passed)[..., None] * values
    keys_of_heads = keys.transpose(1, 2).repeat_interleave(share, dim=1)
    return y, left.transpose(-1, -2) @ keys_of_heads, total


def read_out(enter: Tensor, queries: Tensor, decay: Tensor) -> Tensor:
    """Return the contribution of the states that *enter* chunks to their results."""
    share = enter.shape[1] // queries.shape[2]
    queries_of_heads = queries.transpose(1, 2).repeat_interleave(share, dim=1)
    read = (queries_of_heads @ enter.transpose(-1, -2)).transpose(1, 2)
    return read * torch.exp(decay.cumsum(1))[..., None]


def grouped(t: Tensor) -> Tensor:
    """Return *t* as ``(tokens, groups, N)``, with one group if it has none."""
    return t[:, None] if t.ndim == 2 else t


register_scan_fake(ssd_chunk_scan)


@ssd_chunk_scan.register_input_generator
def _inputs(
    num_tokens: int = 8,
    num_heads: int = 4,
    head_size: int = 6,
    state_size: int = 5,
    num_groups: int = 1,
    chunk_size: int = 4,
    num_seqs: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """Make packed sequences; every second one has an initial state."""
    sizes = (num_heads, head_size), (num_groups, state_size), num_seqs + 2
    where = arguments.sequence_inputs(num_tokens, num_seqs, device)
    return *scan_inputs(num_tokens, *sizes, dtype, device), *where, chunk_size, True, None, None


# Sums over many tokens in a different order, and different exponentials. Results are up to about
# ten; in 16-bit dtypes, their rounding dominates.
ssd_chunk_scan.override_tolerance(torch.float32, atol=1e-4, rtol=1e-4)
ssd_chunk_scan.override_tolerance(torch.bfloat16, atol=2e-2, rtol=1.6e-2)
ssd_chunk_scan.override_tolerance(torch.float16, atol=4e-3, rtol=2e-3)

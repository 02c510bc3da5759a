"""Checks of arguments and packed sequences that several ops share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opweave import plain_call
from opweave.ir.rules import plain

# Checks of arguments that several ops share.


def is_readable(tensor: Tensor) -> bool:
    """Whether values can be read at no cost: a plain CPU tensor in eager mode."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in plain_call.PLAIN_TYPES
        and tensor.is_cpu
        and not plain_call.hides_values()
    )


def check_shape(op: str, name: str, tensor: Tensor, *shape: int) -> None:
    """Raise ValueError unless *tensor* has *shape*; -1 stands for any size."""
    fits = tensor.ndim == len(shape) and all(
        size in (-1, actual) for size, actual in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise misfit(op, name, tensor, f"({sizes}{',' * (len(shape) == 1)})")


def misfit(op: str, name: str, tensor: Tensor, expected: str) -> ValueError:
    """Return the error for an argument *name* of *op* that must be *expected*."""
    return ValueError(
        f"{op}: {name} must be {expected}; found {plain(tensor.dtype)}, {tuple(tensor.shape)}."
    )


# Rows and lengths of packed sequences for input generators.


def random_rows(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Tensor:
    """Make random rows, ``(num_tokens, hidden_size)``."""
    return torch.randn(num_tokens, hidden_size, device=device).to(dtype)


def random_row(x: Tensor) -> Tensor:
    """Make a random vector with an element for each column of *x*, in its dtype."""
    return torch.randn(x.shape[-1], device=x.device).to(x.dtype)


def inputs_from_rows(make: Callable[[Tensor], tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return an input generator with the options of :func:`random_rows`, which *make* receives."""

    @functools.wraps(random_rows)
    def generate(*args: Any, **options: Any) -> tuple[Any, ...]:
        return make(random_rows(*args, **options))

    return generate


def sequence_lengths(num_tokens: int, num_seqs: int) -> list[int]:
    """Divide tokens among sequences: one for the first, the rest as evenly as possible.

    With as many sequences as tokens, all of them decode; with more, some are empty. The second of
    more than four is empty, too.

    >>> sequence_lengths(8, 3), sequence_lengths(3, 3), sequence_lengths(1, 2)
    ([1, 4, 3], [1, 1, 1], [1, 0])
    """
    if num_seqs == 1:
        return [num_tokens]
    first, rest = min(num_tokens, 1), num_seqs - 1 - (num_seqs > 4)
    least, more = divmod(num_tokens - first, rest)
    empty = [0] if num_seqs > 4 else []
    return [first, *empty, *(least + (i < more) for i in range(rest))]


def boundaries(lengths: Sequence[int], device: str) -> Tensor:
    """Return cumulative sequence lengths from 0 on, int32, ``(len(lengths) + 1,)``."""
    sums = torch.tensor([0, *lengths], device=device).cumsum(0)
    return sums.to(torch.int32)


# Sequence lengths as numbers on the host.
#
# Ops take lengths as tensors on the device, and reading those waits for all earlier work. Kernels
# that plan on the host need the numbers before they run. The program that makes the tensors from
# numbers notes these with the tensors, and implementations look them up.


_NOTE = "_opweave_lengths"  # an attribute of seq_lens: the note ends with the tensor


# No eq or repr: generating those takes import time.
@dataclass(eq=False, repr=False)
class HostLengths:
    """The lengths of packed sequences over a paged cache, as numbers.

    Attributes:
        cu_seqlens_q: the tensor of *starts*.
        starts: the first query of each sequence, and the end of the last.
        lengths: the number of keys of each sequence.
        is_recorded: whether recorded launches read the tensors. Then each sequence has one query
            and at least one key, and the numbers change in :meth:`update` only.
        plans: objects that implementations derive once for all layers, by keys of their own. Each
            has a method ``update``, which takes these lengths.
    """

    cu_seqlens_q: Tensor
    starts: Sequence[int]
    lengths: Sequence[int]
    is_recorded: bool = False
    plans: dict[Any, Any] = field(default_factory=dict)

    def update(self, lengths: Sequence[int]) -> None:
        """Set *lengths* and update every plan, before recorded launches are replayed.

        The lengths and block tables on the device must have been written.
        """
        self.lengths = lengths
        for plan in self.plans.values():
            plan.update(self)


def note_lengths(
    seq_lens: Tensor, cu_seqlens_q: Tensor, lengths: Sequence[int], starts: Sequence[int],
    *, is_recorded: bool = False,
) -> HostLengths:  # fmt: skip
    """Note the numbers in *seq_lens* and *cu_seqlens_q* for calls with these two tensors.

    Implementations keep plans with the note, so note again after a change of the tensors, or of
    block tables that were used with them.

    Args:
        seq_lens, cu_seqlens_q: as in ``paged_attention``.
        lengths, starts: their numbers.
        is_recorded: see :class:`HostLengths`.
    """
    setattr(seq_lens, _NOTE, noted := HostLengths(cu_seqlens_q, starts, lengths, is_recorded))
    return noted


def host_lengths(seq_lens: Tensor, cu_seqlens_q: Tensor) -> HostLengths | None:
    """Return the lengths that are noted for these tensors, or None."""
    noted: HostLengths | None = getattr(seq_lens, _NOTE, None)
    return noted if noted is not None and noted.cu_seqlens_q is cu_seqlens_q else None


def with_noted_lengths(names: Sequence[str], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Read and note the lengths in the arguments of a call, and return these; for tools."""
    named = dict(zip(names, values, strict=False))  # defaults may be missing
    lengths, starts = named.get("seq_lens"), named.get("cu_seqlens_q")
    if isinstance(lengths, Tensor) and isinstance(starts, Tensor):
        note_lengths(lengths, starts, lengths.tolist(), starts.tolist())
    return values


# Packed sequences with states in slots, as the state-space ops use them.
#
# A state tensor is ``(slots, ...)``. Sequence ``i`` has the tokens
# ``query_start_loc[i]:query_start_loc[i + 1]`` and its state in slot ``slot_idx[i]``; slot -1
# marks padding, a sequence that is not computed.


def read_states(x_state: Tensor, slot_idx: Tensor) -> Tensor:
    """Return the state of each sequence, zeros for padding; IndexError if a slot is invalid."""
    return _with_spare(x_state)[_index(slot_idx, x_state.shape[0])]


def write_states(x_state: Tensor, slot_idx: Tensor, new: Tensor) -> Tensor:
    """Return *x_state* with the new states of the sequences in their slots."""
    count = x_state.shape[0]
    index = _index(slot_idx, count)
    return _with_spare(x_state).index_copy(0, index, new.to(x_state.dtype))[:count]


def initial_states(x_state: Tensor, slot_idx: Tensor, has_initial_state: Tensor) -> Tensor:
    """Return the initial state of each sequence: that of its slot, or zeros."""
    is_initialized = has_initial_state.view(-1, *[1] * (x_state.ndim - 1))
    return torch.where(is_initialized, read_states(x_state, slot_idx), 0)


def is_computed(sequence: Tensor, slot_idx: Tensor) -> Tensor:
    """Return whether each token belongs to a sequence that is not padding, ``(tokens,)``."""
    after_the_last = slot_idx.new_full((1,), -1)
    return torch.cat((slot_idx, after_the_last))[sequence] >= 0


def check_slots(op: str, slot_idx: Tensor, count: int | None = None) -> None:
    """Raise ValueError unless *slot_idx* is a vector of indices, one for each of *count* rows."""
    is_vector = slot_idx.ndim == 1 and slot_idx.dtype in (torch.int32, torch.int64)
    if not is_vector or (count is not None and slot_idx.shape[0] != count):
        length = "sequences" if count is None else str(count)
        raise misfit(op, "slot_idx", slot_idx, f"int32 or int64, ({length},)")


def check_sequences(
    op: str, query_start_loc: Tensor, slot_idx: Tensor, has_initial_state: Tensor
) -> None:
    """Raise ValueError unless the three describe the same number of sequences."""
    check_slots(op, slot_idx)
    count = slot_idx.shape[0]
    integer = query_start_loc.dtype in (torch.int32, torch.int64)
    if not integer or query_start_loc.shape != (count + 1,):
        raise misfit(op, "query_start_loc", query_start_loc, f"int32 or int64, ({count + 1},)")
    if has_initial_state.dtype != torch.bool or has_initial_state.shape != (count,):
        raise misfit(op, "has_initial_state", has_initial_state, f"bool, ({count},)")


def sequence_inputs(num_tokens: int, num_seqs: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Make starts, slots below ``num_seqs + 2``, and flags for initial states of sequences.

    Every second sequence has an initial state.
    """
    return (
        boundaries(sequence_lengths(num_tokens, num_seqs), device),
        torch.randperm(num_seqs + 2, device=device)[:num_seqs].to(torch.int32),
        torch.arange(num_seqs, device=device) % 2 == 1,
    )


def some_slots(num_tokens: int, device: str) -> Tensor:
    """Make a slot below ``num_tokens + 4`` for each token; the first quarter is padding."""
    slots = torch.randperm(num_tokens + 4, device=device)[:num_tokens].to(torch.int32)
    slots[: num_tokens // 4] = -1
    return slots


def _with_spare(x_state: Tensor) -> Tensor:
    """Append a spare state for padding."""
    return torch.cat((x_state, x_state.new_zeros(1, *x_state.shape[1:])))


def _index(slot_idx: Tensor, count: int) -> Tensor:
    """Return the index of each state; invalid slots stay out of range, so that torch raises."""
    valid = (slot_idx >= -1) & (slot_idx < count)
    return torch.where(valid, slot_idx % (count + 1), count + 1).long()

"""Packed sequences whose states lie in slots: what the state-space ops have in common.

A state tensor is ``(slots, ...)``. Sequence ``i`` has the tokens
``query_start_loc[i]:query_start_loc[i + 1]`` and its state in slot ``slot_idx[i]``; slot -1 is for
padding, a sequence that is computed by nobody.
"""

import torch
from torch import Tensor

from opweave.ir.ops.sequences import boundaries, sequence_lengths


def read_states(x_state: Tensor, slot_idx: Tensor) -> Tensor:
    """Return the state of every sequence, zeros for padding (IndexError: there is no such slot)."""
    return _with_spare(x_state)[_index(slot_idx, x_state.shape[0])]


def write_states(x_state: Tensor, slot_idx: Tensor, new: Tensor) -> Tensor:
    """Return *x_state* with the sequences' new states in their slots."""
    count = x_state.shape[0]
    index = _index(slot_idx, count)
    return _with_spare(x_state).index_copy(0, index, new.to(x_state.dtype))[:count]


def initial_states(x_state: Tensor, slot_idx: Tensor, has_initial_state: Tensor) -> Tensor:
    """Return what each sequence begins with: its state, or zeros if it has none."""
    known = has_initial_state.view(-1, *[1] * (x_state.ndim - 1))
    return torch.where(known, read_states(x_state, slot_idx), 0)


def is_computed(sequence: Tensor, slot_idx: Tensor) -> Tensor:
    """Return whether each token is one of a sequence, and that no padding: ``(tokens,)``."""
    after_the_last = slot_idx.new_full((1,), -1)
    return torch.cat((slot_idx, after_the_last))[sequence] >= 0


def check_slots(op: str, slot_idx: Tensor, count: int | None = None) -> None:
    """Raise ValueError unless *slot_idx* is a vector of indices, one for each of *count* rows."""
    length = "sequences" if count is None else str(count)
    if slot_idx.ndim != 1 or slot_idx.dtype not in (torch.int32, torch.int64):
        raise misfit(op, "slot_idx", slot_idx, f"int32 or int64, ({length},)")
    if count is not None and slot_idx.shape[0] != count:
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


def check_shape(op: str, name: str, tensor: Tensor, *shape: int) -> None:
    """Raise ValueError unless *tensor* has *shape*; -1 stands for any size."""
    fits = tensor.ndim == len(shape) and all(
        wanted in (-1, found) for wanted, found in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise misfit(op, name, tensor, f"({sizes}{',' * (len(shape) == 1)})")


def misfit(op: str, name: str, tensor: Tensor, wanted: str) -> ValueError:
    """Return the error that says what argument *name* of *op* is, and what it must be."""
    found = f"{str(tensor.dtype).removeprefix('torch.')}, {tuple(tensor.shape)}"
    return ValueError(f"{op}: {name} must be {wanted}; found {found}.")


def sequence_inputs(num_tokens: int, num_seqs: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Make where sequences are: starts, slots below ``num_seqs + 2``, and which of them continue.

    Every other one does, from the second on.
    """
    return (
        boundaries(sequence_lengths(num_tokens, num_seqs), device),
        torch.randperm(num_seqs + 2, device=device)[:num_seqs].to(torch.int32),
        torch.arange(num_seqs, device=device) % 2 == 1,
    )


def some_slots(num_tokens: int, device: str) -> Tensor:
    """Make a slot below ``num_tokens + 4`` for each token; the first of several are padding."""
    slots = torch.randperm(num_tokens + 4, device=device)[:num_tokens].to(torch.int32)
    slots[: num_tokens // 4] = -1
    return slots


def _with_spare(x_state: Tensor) -> Tensor:
    """Return the states and one more, which is the padding's."""
    return torch.cat((x_state, x_state.new_zeros(1, *x_state.shape[1:])))


def _index(slot_idx: Tensor, count: int) -> Tensor:
    """Return where each sequence's state is; what is out of bounds stays so."""
    valid = (slot_idx >= -1) & (slot_idx < count)
    return torch.where(valid, slot_idx % (count + 1), count + 1).long()

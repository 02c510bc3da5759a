"""Read the tokens and state slots of sequences on the host."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from opweave.ir import rules

# The state must be contiguous, because it is returned, and native returns a contiguous tensor.
IN_PLACE = rules.contiguous("x_state") & rules.has_values("slot_idx")
"""The rules of kernels with one slot per token that update the state in-place."""

PACKED = IN_PLACE & rules.has_values("query_start_loc", "has_initial_state")
"""The rules of kernels that also read the boundaries of packed sequences."""


def own_slots(count: int, slot_idx: Tensor) -> list[int]:
    """Return the slot of each sequence, -1 for padding.

    Raises:
        IndexError: a slot is out of range.
    """
    _check(count, slot_idx)
    slots: list[int] = slot_idx.tolist()
    return slots


def sequences(
    query_start_loc: Tensor, slots: list[int], has_initial_state: Tensor
) -> Iterator[tuple[slice, int, bool]]:
    """Yield (tokens, slot, has initial state) for each sequence that is not padding."""
    starts, known = query_start_loc.tolist(), has_initial_state.tolist()
    for i, slot in enumerate(slots):
        if slot >= 0:
            yield slice(starts[i], starts[i + 1]), slot, known[i]


def padded_slots(count: int, slot_idx: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that are not padding, and their slots, both int64.

    Raises:
        IndexError: a slot is out of range.
    """
    _check(count, slot_idx)
    rows = (slot_idx >= 0).nonzero()[:, 0]
    return rows, slot_idx[rows].long()


def _check(count: int, slot_idx: Tensor) -> None:
    # Reads values first: a tracer stops here, before it specializes on the number of slots.
    outside = (slot_idx < -1) | (slot_idx >= count)
    if outside.any():
        slots = slot_idx[outside].tolist()
        raise IndexError(f"slots {slots} are out of range: there are {count} slots, and -1 pads.")

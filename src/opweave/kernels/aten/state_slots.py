"""Which tokens and slots are whose, read on the host."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from opweave.ir import rules

# What an op returns is laid out as native returns it: contiguous.
IN_PLACE = rules.contiguous("x_state") & rules.has_values("slot_idx")
"""What kernels ask that read one slot for each token, and write the state into it."""

PACKED = IN_PLACE & rules.has_values("query_start_loc", "has_initial_state")
"""What kernels ask that also read where packed sequences begin."""


def own_slots(count: int, slot_idx: Tensor) -> list[int]:
    """Return the slot of each sequence, -1 for padding (IndexError: there is no such slot)."""
    _check(count, slot_idx)
    slots: list[int] = slot_idx.tolist()
    return slots


def sequences(
    query_start_loc: Tensor, slots: list[int], has_initial_state: Tensor
) -> Iterator[tuple[slice, int, bool]]:
    """Yield the tokens of each sequence that is no padding, its slot, and if it has a state."""
    starts, known = query_start_loc.tolist(), has_initial_state.tolist()
    for i, slot in enumerate(slots):
        if slot >= 0:
            yield slice(starts[i], starts[i + 1]), slot, known[i]


def padded_slots(count: int, slot_idx: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows are no padding, and their slots (IndexError: there is no such slot)."""
    _check(count, slot_idx)
    rows = (slot_idx >= 0).nonzero()[:, 0]
    return rows, slot_idx[rows].long()


def _check(count: int, slot_idx: Tensor) -> None:
    # Asked of the values first: a tracer stops here, and has not yet taken their number for fixed.
    outside = (slot_idx < -1) | (slot_idx >= count)
    if outside.any():
        slots = slot_idx[outside].tolist()
        raise IndexError(f"slots {slots} are none of {count} slots, and not -1.")

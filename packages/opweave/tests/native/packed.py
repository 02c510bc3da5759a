"""Packed sequences with states in slots, and an oracle applied to each of them alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where sequences of some lengths are: the tokens, the slots (-1: padding), who has a state."""

    lengths: Sequence[int]
    slots: Sequence[int]
    known: Sequence[bool]
    tokens: int

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """``query_start_loc``, ``slot_idx``, ``has_initial_state``."""
        slots = torch.tensor(self.slots, dtype=torch.int32)
        return pack(self.lengths), slots, torch.tensor(self.known, dtype=torch.bool)


def pack(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def layout(lengths: Sequence[int], *, slots: int, after: int) -> Packing:
    """Random slots, the last of three or more sequences padding; *after* tokens more."""
    chosen = torch.randperm(slots)[: len(lengths)].tolist()
    if len(lengths) > 2:
        chosen[-1] = -1
    known = [i % 2 == 0 for i in range(len(lengths))]
    return Packing(lengths, chosen, known, sum(lengths) + after)


def by_sequence(
    packing: Packing,
    x: Tensor,
    state: Tensor,
    oracle: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    *others: Tensor,
) -> tuple[Tensor, Tensor]:
    """Apply *oracle* to each sequence's tokens (of *x* and *others*) and what it begins with."""
    y, new = torch.zeros_like(x), state.clone()
    ends = itertools.accumulate(packing.lengths)
    for length, end, slot, known in zip(
        packing.lengths, ends, packing.slots, packing.known, strict=True
    ):
        if slot >= 0:
            tokens = slice(end - length, end)
            before = state[slot] if known else torch.zeros_like(state[slot])
            parts = [t[tokens] for t in (x, *others)]
            y[tokens], new[slot] = oracle(*parts, before)  # type: ignore[call-arg]
    return y, new

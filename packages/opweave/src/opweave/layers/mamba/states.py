"""States of state-space layers for the earlier tokens of each sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from opweave.layers.errors import LayerArgumentError


class StateCache:
    """The states of a model's layers, with a slot for each sequence.

    Memory for a layer is allocated on first use. A slot may be reused by another sequence without
    being cleared, because a sequence without an initial state does not read it.

    Args:
        num_slots: the number of slots.

    >>> StateCache(4).get("mixer", "conv", (6, 3), torch.float32, "cpu").shape
    torch.Size([4, 6, 3])
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise LayerArgumentError(f"num_slots={num_slots} is negative.")
        self.num_slots = num_slots
        self._states: dict[tuple[str, str], Tensor] = {}

    def get(
        self,
        layer: str,
        kind: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Tensor:
        """Return the states of one *kind* of a layer, ``(num_slots, *shape)``.

        Args:
            layer: the name of the layer in the model.
            kind: ``"conv"`` or ``"ssm"``.
            shape: the shape of one sequence's state.
            dtype, device: dtype and device of the states if they are not allocated yet.
        """
        found = self._states.get((layer, kind))
        if found is None:
            found = torch.zeros(self.num_slots, *shape, dtype=dtype, device=device)
            self._states[layer, kind] = found
        return found

    def put(self, layer: str, kind: str, states: Tensor) -> None:
        """Replace the states of a layer with *states*, which may be the same memory."""
        self._states[layer, kind] = states.detach()


@dataclass(frozen=True, slots=True)
class SequenceStates:
    """The packed sequences of one forward, and the slots of their states.

    Attributes:
        query_start_loc: ``(sequences + 1,)``, int32: the first new token of each sequence.
        slot_idx: ``(sequences,)``, int32: the slot of each sequence; -1 for padding.
        has_initial_state: ``(sequences,)``, bool: whether the sequence has earlier tokens.
        cache: the states.
        num_decodes: the number of leading sequences in decode: one new token, and earlier tokens.
    """

    query_start_loc: Tensor
    slot_idx: Tensor
    has_initial_state: Tensor
    cache: StateCache
    num_decodes: int = 0

    @classmethod
    def of(
        cls,
        new_tokens: Sequence[int],
        known_tokens: Sequence[int],
        slots: Sequence[int],
        cache: StateCache,
        device: torch.device | str = "cpu",
    ) -> SequenceStates:
        """Describe sequences by their numbers of new and of earlier tokens, and their slots.

        Put sequences in decode first: this is fastest.

        Raises:
            LayerArgumentError: the three lists differ in length.
        """
        if not len(new_tokens) == len(known_tokens) == len(slots):
            raise LayerArgumentError(
                f"{len(new_tokens)} new_tokens, {len(known_tokens)} known_tokens and {len(slots)} "
                "slots do not fit; there must be one of each for every sequence."
            )
        decodes = [
            new == 1 and known > 0 for new, known in zip(new_tokens, known_tokens, strict=True)
        ]
        starts = [0, *accumulate(new_tokens)]
        return cls(
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(slots, dtype=torch.int32, device=device),
            torch.tensor([known > 0 for known in known_tokens], dtype=torch.bool, device=device),
            cache,
            [*decodes, False].index(False),
        )

    def decodes(self) -> Tensor:
        """Return the slots of the sequences in decode."""
        return self.slot_idx[: self.num_decodes]

    def others(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return starts, slots and initial states of the sequences that are not in decode."""
        first = self.num_decodes
        starts = self.query_start_loc[first:] - first
        return starts, self.slot_idx[first:], self.has_initial_state[first:]

    def has_others(self, tokens: Tensor) -> bool:
        """Whether sequences are left that are not in decode, or *tokens* belong to no sequence.

        Also true if there are no sequences.
        """
        return not 0 < self.num_decodes == self.slot_idx.shape[0] == tokens.shape[0]


_current: ContextVar[SequenceStates | None] = ContextVar("opweave_sequence_states", default=None)
current_sequence_states = _current.get


@contextmanager
def sequence_states(states: SequenceStates | None) -> Iterator[None]:
    """Make layers use *states* inside the block, in this thread or asyncio task."""
    token = _current.set(states)
    try:
        yield
    finally:
        _current.reset(token)


def states_of(tokens: Tensor) -> SequenceStates:
    """Return the current states, or those of one new sequence of *tokens* if none are set."""
    current = current_sequence_states()
    if current is not None:
        return current
    return SequenceStates.of([tokens.shape[0]], [0], [0], StateCache(1), tokens.device)

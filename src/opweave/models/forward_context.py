"""Where layers find what they know of earlier tokens, while a model runs.

A model's forward is ``(input_ids, positions)``: what else a step needs is in the context, so that
the model's code and graph are the same for every way to batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from opweave.layers.mamba.states import (
    SequenceStates,
    current_sequence_states,
    sequence_states,
)


class KeyValueCache(Protocol):
    """Keeps keys and values of the sequences of one forward."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new tokens' keys and values; return those of all tokens, packed.

        Args:
            layer: the index of the layer.
            key, value: ``(new_tokens, kv_heads, head_dim)``, sequence after sequence.

        Returns:
            Keys and values ``(all_tokens, kv_heads, head_dim)``, sequence after sequence.
        """


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The sequences that are packed in one forward.

    Attributes:
        cu_seqlens_q: ``(sequences + 1,)``, int32: where each sequence's new tokens begin.
        cu_seqlens_k: the same for all of its tokens, the cached ones included.
        kv_cache: their keys and values.
        states: where layers with states of another kind find them; None: there are no such layers,
            or :func:`~opweave.layers.sequence_states` says it.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    kv_cache: KeyValueCache
    states: SequenceStates | None = None


_current: ContextVar[ForwardContext | None] = ContextVar("opweave_forward_context", default=None)
current_forward_context = _current.get


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make *context* the current one inside the block, in this thread or asyncio task."""
    token = _current.set(context)
    try:
        with sequence_states(context.states or current_sequence_states()):
            yield
    finally:
        _current.reset(token)

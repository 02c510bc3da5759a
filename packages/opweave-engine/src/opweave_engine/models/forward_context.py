"""The forward context, which gives layers access to earlier tokens while a model runs.

A model's forward is ``(input_ids, positions)``. Everything else that a step needs is in the
context, so the model's code and graph are the same for any batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from opweave.layers.mamba_states import SequenceStates, current_sequence_states, sequence_states


@dataclass(frozen=True, slots=True)
class CachedRows:
    """The cache entry of a token for one attention layer on this rank.

    Attributes:
        layer: the index of the layer.
        num_heads: the number of key heads, and of value heads.
        key_size, value_size: the sizes of a head. 0 for the values of latent attention, which are
            computed from the keys.
        window: the size of the sliding window, or None.
    """

    layer: int
    num_heads: int
    key_size: int
    value_size: int
    window: int | None = None


class CachedAttention(Protocol):
    """Attention over the sequences of one forward, which writes their new tokens into a cache.

    Sequences are packed. Each token attends to itself and to earlier tokens of its sequence,
    including cached ones.
    """

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        """Return ``(T, heads, value_size)``.

        Args:
            layer: the index of the layer.
            query: ``(T, heads, head_size)``.
            key, value: ``(T, kv_heads, size)`` of the new tokens.
            scale, window, soft_cap: as in ``ir.ops.paged_attention``.
        """

    def attend_latent(
        self,
        layer: int,
        query: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        kv_b_weight: Tensor,
        scale: float,
    ) -> Tensor:
        """Return ``(T, heads, value_size)``.

        Args:
            layer: the index of the layer.
            query, kv_c, k_pe, kv_b_weight, scale: as in ``ir.ops.mla_attention_prefill``; latent
                vectors and rotated parts are those of the new tokens.
        """


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The sequences that are packed in one forward.

    Attributes:
        attention: the attention over new and cached tokens.
        states: the states of recurrent layers; None: there are no such layers, or
            :func:`~opweave.layers.sequence_states` sets them.
    """

    attention: CachedAttention
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

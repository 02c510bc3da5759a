"""Cache specifications: the state that each layer keeps of computed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from opweave.layers.errors import DuplicateLayerError
from opweave.layers.mamba.stateful import StatefulLayer, state_dtype
from opweave_engine.cache import EveryToken, Retention, SequenceState, Window
from opweave_engine.models.attention import Attention
from opweave_engine.models.latent_attention import LatentAttention


@dataclass(frozen=True)
class FullAttentionSpec:
    """Keys and values of every token.

    Attributes:
        num_kv_heads: the number of key and value heads on this rank.
        key_size, value_size: the sizes of a head.
        dtype: the dtype of keys and values.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @property
    def retention(self) -> Retention:
        """Which blocks of a sequence are needed."""
        return EveryToken()

    def block_bytes(self, block_size: int) -> int:
        """Return the size of one block of *block_size* tokens."""
        row = self.num_kv_heads * (self.key_size + self.value_size)
        return block_size * row * self.dtype.itemsize


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values of the last tokens.

    Attributes:
        window: the number of tokens, including the current one.
    """

    window: int

    @property
    def retention(self) -> Retention:
        return Window(self.window)


@dataclass(frozen=True)
class LatentAttentionSpec:
    """One row for all heads of every token: the latent vector and the rotated part of the key.

    Attributes:
        row_size: the size of the row.
        dtype: the dtype of the row.
    """

    row_size: int
    dtype: torch.dtype

    @property
    def retention(self) -> Retention:
        """Which blocks of a sequence are needed."""
        return EveryToken()

    def block_bytes(self, block_size: int) -> int:
        """Return the size of one block of *block_size* tokens."""
        return block_size * self.row_size * self.dtype.itemsize


@dataclass(frozen=True)
class StateSpec:
    """One kind of state.

    Attributes:
        kind: ``"conv"`` or ``"ssm"``.
        shape: the shape of one sequence's state.
        dtype: the dtype of the state.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StateSpaceSpec:
    """The states of a sequence, whose size does not depend on its length.

    Attributes:
        states: one of each kind.
    """

    states: tuple[StateSpec, ...]

    @property
    def retention(self) -> Retention:
        """One slot per sequence."""
        return SequenceState()

    def block_bytes(self, block_size: int) -> int:
        """Return the size of one sequence's states."""
        return sum(prod(state.shape) * state.dtype.itemsize for state in self.states)


CacheSpec = FullAttentionSpec | LatentAttentionSpec | StateSpaceSpec


def cache_specs(model: nn.Module, dtype: torch.dtype) -> dict[int | str, CacheSpec]:
    """Return the cache specification of each attention layer by index, and stateful layer by name.

    Args:
        model: the model, whose modules declare their requirements.
        dtype: the dtype of its activations.

    Raises:
        DuplicateLayerError: two layers have the same index or name, so they would share a cache.
    """
    found: dict[int | str, CacheSpec] = {}
    holders: dict[int | str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Attention | LatentAttention | StatefulLayer):
            continue
        layer = module.prefix if isinstance(module, StatefulLayer) else module.cached.layer
        if layer in holders:
            raise DuplicateLayerError(
                f"{holders[layer]} and {name} are both layer {layer!r} to the cache, which would "
                "mix up what they keep. Give each layer of the model an index or prefix of its own."
            )
        found[layer], holders[layer] = _spec(module, dtype), name
    return found


def _spec(module: Attention | LatentAttention | StatefulLayer, dtype: torch.dtype) -> CacheSpec:
    if isinstance(module, StatefulLayer):
        return StateSpaceSpec(
            tuple(
                StateSpec(kind, shape, state_dtype(dtype, kind))
                for kind, shape in module.state_shapes.items()
            )
        )
    rows = module.cached
    if isinstance(module, LatentAttention):
        return LatentAttentionSpec(rows.key_size, dtype)
    sizes = rows.num_heads, rows.key_size, rows.value_size, dtype
    if rows.window is None:
        return FullAttentionSpec(*sizes)
    return SlidingWindowSpec(*sizes, rows.window)

"""Keys and values of earlier tokens: one plain block of memory for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opweave.models import LlamaConfig


class SequenceCache:
    """The keys and values of one sequence, for every layer.

    Args:
        config: the model.
        capacity: the number of tokens to allocate memory for; it grows when they are more.
    """

    def __init__(
        self,
        config: LlamaConfig,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_tokens = 0
        self._data = torch.empty(  # keys and values, (2, layers, tokens, heads, head_dim)
            2,
            config.num_hidden_layers,
            capacity,
            config.num_key_value_heads,
            config.head_dim,
            dtype=dtype,
            device=device,
        )

    @property
    def capacity(self) -> int:
        """The number of tokens there is memory for."""
        return self._data.shape[2]

    def reserve(self, num_tokens: int) -> None:
        """Make room for *num_tokens* more."""
        needed = self.num_tokens + num_tokens
        if needed <= self.capacity:
            return
        old = self._data
        self._data = old.new_empty(*old.shape[:2], max(needed, 2 * self.capacity), *old.shape[3:])
        self._data[:, :, : self.num_tokens] = old[:, :, : self.num_tokens]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put new tokens after those that :meth:`advance` confirmed; return all of the layer.

        Args:
            layer: the index of the layer.
            key, value: ``(new_tokens, heads, head_dim)``; there must be room for them.

        Returns:
            Views ``(all_tokens, heads, head_dim)``.
        """
        end = self.num_tokens + key.shape[0]
        keys, values = self._data[0, layer, :end], self._data[1, layer, :end]
        keys[self.num_tokens :] = key
        values[self.num_tokens :] = value
        return keys, values

    def advance(self, num_tokens: int) -> None:
        """Confirm that every layer has written *num_tokens* more."""
        self.num_tokens += num_tokens


class PackedCaches:
    """The caches of the sequences in one forward, in order.

    Args:
        caches: one for each sequence.
        new_tokens: how many tokens each gains in this forward.
    """

    def __init__(self, caches: Sequence[SequenceCache], new_tokens: Sequence[int]) -> None:
        self._caches, self._new_tokens = caches, list(new_tokens)
        for cache, count in zip(caches, new_tokens, strict=True):
            cache.reserve(count)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new tokens' keys and values; return those of all tokens, packed."""
        if len(self._caches) == 1:
            return self._caches[0].write(layer, key, value)
        written = [
            cache.write(layer, new_keys, new_values)
            for cache, new_keys, new_values in zip(
                self._caches,
                torch.split_with_sizes(key, self._new_tokens),
                torch.split_with_sizes(value, self._new_tokens),
                strict=True,
            )
        ]
        keys, values = zip(*written, strict=True)
        return torch.cat(keys), torch.cat(values)

    def advance(self) -> None:
        """Confirm the new tokens, when every layer has them."""
        for cache, count in zip(self._caches, self._new_tokens, strict=True):
            cache.advance(count)

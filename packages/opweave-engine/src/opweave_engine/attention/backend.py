"""The interface of attention backends: allocate a layer's cache, write to it, attend to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from opweave_engine.attention.batch import SequenceBatch
from opweave_engine.attention.specs import CacheSpec
from opweave_engine.errors import UnsupportedCacheError


class AttentionBackend(ABC):
    """The cache of one layer, and attention over it.

    A platform names the class for each layer in ``get_attn_backend_cls``. An opaque op calls it, so
    it is not traced.

    Args:
        spec: the cache specification of the layer.
        num_blocks: the number of blocks, including the null block (0), which is never written.
        block_size: tokens per block.
        device: the device of the cache.

    Attributes:
        name: the name for users.
        block_multiple: *block_size* must be a multiple of this number.

    Raises:
        UnsupportedCacheError: the backend does not support *spec*.
    """

    name: ClassVar[str]
    block_multiple: ClassVar[int] = 1

    def __init__(
        self, spec: CacheSpec, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        reason = self.unsupported(spec)
        if block_size % self.block_multiple:
            reason = (
                f"its blocks hold a multiple of {self.block_multiple} tokens, not {block_size}: "
                "change block_size in the cache's configuration"
            )
        if reason is not None:
            raise UnsupportedCacheError(
                f"The attention backend {self.name!r} cannot keep {spec}: {reason}."
            )
        self.allocate(spec, num_blocks, block_size, device)

    @classmethod
    def unsupported(cls, spec: CacheSpec) -> str | None:
        """Return why the backend does not support *spec*, or None if it does."""
        return None

    @classmethod
    def build_metadata(cls, batch: SequenceBatch) -> Any:
        """Return the data of a step for :meth:`forward`; called once for all layers of a group."""
        return batch

    @abstractmethod
    def allocate(
        self, spec: CacheSpec, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        """Allocate the cache; the arguments are those of the class.

        The null block must hold zeros. Other blocks are written before they are read, so they need
        not be initialized, and the operating system can provide their memory lazily.
        """

    @abstractmethod
    def forward(self, metadata: Any, *inputs: Any, **options: Any) -> Tensor:
        """Write the new tokens into the cache, and attend to all of their sequences.

        Args:
            metadata: from :meth:`build_metadata`.
            inputs, options: the layer's arguments: query, key, value, scale, window and soft cap;
                for latent attention query, latent vector, rotated key part, the weight of ``kv_b``
                and scale.

        Returns:
            ``(T, heads, value_size)``.
        """

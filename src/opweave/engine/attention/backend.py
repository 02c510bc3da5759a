"""The interface of attention backends: allocate a layer's cache, write to it, attend to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from opweave.engine.attention.batch import SequenceBatch
from opweave.engine.attention.specs import CacheSpec
from opweave.engine.errors import UnsupportedCacheError


class AttentionBackend(ABC):
    """The cache of one layer, and attention over it.

    A platform names the class, for each layer, in ``get_attn_backend_cls``. Calls come from inside
    an opaque op: nothing here is traced.

    Args:
        spec: what the layer keeps.
        num_blocks: how many blocks there are, the null block (0) included. It is never written to.
        block_size: tokens in a block.
        device: where the cache is.

    Attributes:
        name: what users call it.
        block_multiple: it takes blocks of a multiple of so many tokens.

    Raises:
        UnsupportedCacheError: it cannot keep that.
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
        """Return why a layer with that *spec* cannot be served; None if it can."""
        return None

    @classmethod
    def build_metadata(cls, batch: SequenceBatch) -> Any:
        """Return what :meth:`forward` needs of a step; once for all layers of a group."""
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
            inputs, options: what the layer passes: query, key, value, scale, window and soft cap;
                for latent attention query, latent vector, rotated key part, the weight of ``kv_b``
                and scale.

        Returns:
            ``(T, heads, value_size)``.
        """

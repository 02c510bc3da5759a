"""The configuration of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from opweave.config.checks import check_count, check_flag, check_share
from opweave.config.origin import Config
from opweave.ir.errors import SettingError


@dataclass(frozen=True)
class CacheConfig(Config):
    """The paged KV cache, and the states of recurrent layers.

    Attributes:
        block_size: tokens per block; most kernels need a multiple of 16.
        num_blocks: blocks of a layer with full attention; None: as many as fit into memory.
        memory_bytes: memory for all layers together. None: on a device, the rest of
            *memory_utilization*; in host memory, a quarter of the free memory, at most 4 GiB.
            Never more than *max_num_seqs* sequences of the maximum length can use.
        memory_utilization: the fraction of device memory for model and cache.
        enable_prefix_caching: keep the blocks of finished sequences while there is room, and reuse
            them for sequences with the same prefix.

    Raises:
        SettingError: (a ValueError) a value is out of range, or *num_blocks* and *memory_bytes* are
            both given.
    """

    block_size: int = 64
    num_blocks: int | None = None
    memory_bytes: int | None = None
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_count(owner, "block_size", self.block_size)
        for name in ("num_blocks", "memory_bytes"):
            if getattr(self, name) is not None:
                check_count(owner, name, getattr(self, name), ", or None")
        check_share(owner, "memory_utilization", self.memory_utilization)
        check_flag(owner, "enable_prefix_caching", self.enable_prefix_caching)
        if self.num_blocks is not None and self.memory_bytes is not None:
            raise SettingError(
                f"{owner}: num_blocks={self.num_blocks} and memory_bytes={self.memory_bytes} are "
                "mutually exclusive; give one of them."
            )

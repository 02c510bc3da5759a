"""Bookkeeping of the paged KV cache: the blocks of each request. Does not contain tensors."""

from opweave_engine.cache.block_pool import NULL_BLOCK, BlockPool
from opweave_engine.cache.errors import CacheIntegrityError
from opweave_engine.cache.manager import CacheGroup, KVCacheManager
from opweave_engine.cache.retention import EveryToken, Retention, SequenceState, Window

__all__ = [
    "NULL_BLOCK",
    "BlockPool",
    "CacheGroup",
    "CacheIntegrityError",
    "EveryToken",
    "KVCacheManager",
    "Retention",
    "SequenceState",
    "Window",
]

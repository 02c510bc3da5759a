"""Sizes the KV cache: the number of blocks, and the maximum sequence length."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from opweave.config import CacheConfig, SchedulerConfig
from opweave_engine.attention import LayerGroup
from opweave_engine.errors import CacheSizeError
from opweave_engine.kv_cache import CacheGroup, SequenceState, Window

_log = logging.getLogger(__name__)

UNBOUNDED_MODEL_LEN = 32768  # for a model whose states take any length, unless it is told


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The size of the cache.

    Attributes:
        num_blocks: the number of blocks of each group.
        max_model_len: the maximum number of tokens of a prompt and its answer.
        block_size: tokens per block.
    """

    num_blocks: tuple[int, ...]
    max_model_len: int
    block_size: int

    def cache_groups(self, groups: Sequence[LayerGroup]) -> list[CacheGroup]:
        """Return the retention and the number of blocks of each group."""
        return [
            CacheGroup(group.retention, count)
            for group, count in zip(groups, self.num_blocks, strict=True)
        ]


def plan_cache(
    groups: Sequence[LayerGroup],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    context: int | None,
    memory: int,
    free: int,
) -> CachePlan:
    """Divide *memory* between groups of layers.

    Args:
        groups: the groups of layers.
        cache, scheduler: the user's configuration.
        context: the model's maximum sequence length; None: unlimited.
        memory: the maximum size of the cache in bytes.
        free: the free memory in bytes.

    Raises:
        CacheSizeError: the cache does not hold one sequence of the configured maximum length; this
            length exceeds the model's; prompts of this length exceed a step and chunked prefill is
            off; or the cache exceeds the free memory.
    """
    wanted = _wanted_len(scheduler, context)
    sizing = _Sizing(groups, cache.block_size, scheduler, memory)
    best = sizing.total_blocks(wanted)
    total = cache.num_blocks if cache.num_blocks is not None else sizing.affordable(memory, best)
    holds = total * cache.block_size
    if sizing.grows and holds < wanted:
        if scheduler.max_model_len is not None or total < 1:
            raise CacheSizeError(_too_small(cache, sizing, wanted, total, memory))
        _log.warning(
            "The cache holds %d tokens, and so much is the context: a prompt and its answer are "
            "cut to that, though the model takes %d. Give the cache more memory "
            "(cache.memory_bytes or cache.num_blocks; serve --kv-cache-memory) for longer ones.",
            holds,
            wanted,
        )
        wanted = holds
    _check_chunks(scheduler, wanted)
    if (size := sizing.bytes(min(total, best))) > free:
        asked = f"memory_bytes={memory}" if cache.num_blocks is None else f"num_blocks={total}"
        raise CacheSizeError(
            f"With {asked}, the cache takes {size} bytes, but {free} bytes of memory are free. "
            "Give it less (cache.memory_bytes or cache.num_blocks; serve --kv-cache-memory), or "
            "lower max_num_seqs or max_model_len."
        )
    return CachePlan(sizing.blocks(min(total, best)), wanted, cache.block_size)


class _Sizing:
    """The number of blocks of each group, for a number of blocks of groups that keep every token.

    There are states for as many sequences as may run together, if they fit into the memory, or
    into half of it if other layers need memory too.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_size: int,
        scheduler: SchedulerConfig,
        memory: int,
    ) -> None:
        self._groups, self._block_size, self._limits = groups, block_size, scheduler
        states = [g.block_bytes for g in groups if isinstance(g.retention, SequenceState)]
        self.grows = len(states) < len(groups)
        self._slots = 0
        if states:
            share = memory // 2 if self.grows else memory
            self._slots = min(scheduler.max_num_seqs, share // states[0] - 1)  # one is null
            if self._slots < 1:
                raise CacheSizeError(
                    f"The states of one sequence take {states[0]} bytes, and there is one more set "
                    f"that nobody owns, but {share} bytes are for states. Give the cache more "
                    "memory (cache.memory_bytes; serve --kv-cache-memory)."
                )

    def total_blocks(self, max_model_len: int) -> int:
        """Return the number of blocks for all sequences at the maximum length."""
        return self._limits.max_num_seqs * -(-max_model_len // self._block_size)

    def blocks(self, total: int) -> tuple[int, ...]:
        """Return the number of blocks of each group; groups that keep every token have *total*."""
        return tuple(self._of(group, total) for group in self._groups)

    def bytes(self, total: int) -> int:
        """Return the size in bytes, including null blocks."""
        counts = zip(self._groups, self.blocks(total), strict=True)
        return sum(group.block_bytes * (count + 1) for group, count in counts)

    def affordable(self, memory: int, most: int) -> int:
        """Return the largest number of blocks, at most *most*, that fits into *memory*."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes(middle) <= memory else (low, middle - 1)
        return low

    def _of(self, group: LayerGroup, total: int) -> int:
        if isinstance(group.retention, SequenceState):
            return self._slots
        if not isinstance(group.retention, Window):
            return total
        # The blocks that each sequence keeps and that one step adds; two more for partial blocks.
        kept = self._blocks(group.retention.size) + 2
        step = self._blocks(self._limits.max_num_batched_tokens)
        return min(total, self._limits.max_num_seqs * kept + step)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


def _wanted_len(scheduler: SchedulerConfig, context: int | None) -> int:
    asked = scheduler.max_model_len
    if asked is None:
        return UNBOUNDED_MODEL_LEN if context is None else context
    if context is not None and asked > context:
        raise CacheSizeError(
            f"max_model_len={asked} is more than the model's context of {context} tokens. Lower "
            "it, or leave it out."
        )
    return asked


def _check_chunks(scheduler: SchedulerConfig, max_model_len: int) -> None:
    if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < max_model_len:
        raise CacheSizeError(
            f"Without chunked prefill, a step must take a prompt of max_model_len={max_model_len} "
            f"tokens, but max_num_batched_tokens={scheduler.max_num_batched_tokens}. Raise that, "
            "lower max_model_len, or enable chunked prefill."
        )


def _too_small(cache: CacheConfig, sizing: _Sizing, wanted: int, total: int, memory: int) -> str:
    needed = -(-wanted // cache.block_size)
    if cache.num_blocks is not None:
        return (
            f"num_blocks={total} of {cache.block_size} tokens do not hold a sequence of "
            f"{wanted} tokens. Give at least {needed} blocks, or lower max_model_len."
        )
    return (
        f"{memory} bytes of memory hold {total} blocks of {cache.block_size} tokens, but a "
        f"sequence of {wanted} tokens takes {needed}, which are {sizing.bytes(needed)} bytes. Give "
        "the cache more memory (cache.memory_bytes; serve --kv-cache-memory), or lower "
        "max_model_len."
    )

"""The paged KV cache: its size, which requests hold its blocks, and cached prefixes."""

from __future__ import annotations

import logging
import sys
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, NamedTuple

from opweave.config import CacheConfig, SchedulerConfig
from opweave_engine.errors import CacheSizeError, EngineError
from opweave_engine.request import Request

# Errors in the cache's bookkeeping, which are bugs of the engine.


class CacheIntegrityError(EngineError):
    """Blocks are owned twice, lost, or counted wrongly."""


# Hashes of blocks of tokens; equal hashes mean that the salt and all tokens up to there match.


_HASH_BYTES = 16  # makes collisions infeasible, even for somebody who looks for them


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: str | None = None
) -> None:
    """Append the missing hashes of the full blocks of *token_ids* to *hashes*.

    Each hash covers the previous hash and the block's tokens; the first one covers the salt.
    """
    for end in range((len(hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        before = hashes[-1] if hashes else _root(cache_salt)
        tokens = array("q", token_ids[end - block_size : end]).tobytes()
        hashes.append(blake2b(before + tokens, digest_size=_HASH_BYTES).digest())


def _root(cache_salt: str | None) -> bytes:
    """Return the bytes that stand for the hash of the block before the first one."""
    if cache_salt is None:
        return b""
    # A client chooses the salt. The personalization keeps its hash apart from those of blocks, so
    # that no salt stands for the tokens of another request.
    salt = cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(salt, digest_size=_HASH_BYTES, person=b"cache_salt").digest()


# Retention policies: which blocks of a sequence a group of layers still needs.


@dataclass(frozen=True, slots=True)
class Retention:
    """The blocks of a sequence that a group of layers keeps.

    Attributes:
        shares_prefixes: whether other sequences can reuse the blocks of a prefix.
    """

    shares_prefixes: ClassVar[bool] = True

    def first_block(self, num_computed: int, block_size: int) -> int:
        """Return the first block that tokens after the first *num_computed* ones read."""
        return 0

    def end_block(self, num_tokens: int, block_size: int) -> int:
        """Return the number of blocks that *num_tokens* tokens need, counted from the start."""
        return -(-num_tokens // block_size)

    def unchanged_up_to(self, num_blocks: int, num_dropped: int, block_size: int) -> int:
        """Return the number of tokens up to which a table of these blocks stays as it is."""
        return num_blocks * block_size


class EveryToken(Retention):
    """Keeps every token: full attention."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Window(Retention):
    """Keeps the last *size* tokens, including the current one: a sliding window."""

    size: int

    def first_block(self, num_computed: int, block_size: int) -> int:
        return max(0, num_computed + 1 - self.size) // block_size

    def unchanged_up_to(self, num_blocks: int, num_dropped: int, block_size: int) -> int:
        return min(num_blocks * block_size, (num_dropped + 1) * block_size + self.size - 1)


class SequenceState(Retention):
    """One state per sequence, regardless of its length: a state-space layer.

    The next token overwrites the state, so other sequences cannot reuse it.
    """

    __slots__ = ()
    shares_prefixes: ClassVar[bool] = False

    def end_block(self, num_tokens: int, block_size: int) -> int:
        return 1

    def unchanged_up_to(self, num_blocks: int, num_dropped: int, block_size: int) -> int:
        return sys.maxsize


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same retention, which share block tables.

    Attributes:
        retention: the blocks of a sequence that they keep.
        layers: indices of attention layers, or names of stateful layers.
        block_bytes: the size of one block in all layers together.
    """

    retention: Retention
    layers: tuple[int | str, ...]
    block_bytes: int


# The size of the cache: the number of blocks, and the maximum sequence length.


_log = logging.getLogger(__name__)

UNBOUNDED_MODEL_LEN = 32768  # for a model whose states take any length, unless it is configured


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
    length, block_size = _max_model_len(scheduler, context), cache.block_size
    sizing = _Sizing(groups, block_size, scheduler, memory)
    # More blocks than all sequences need at the maximum length are of no use.
    most = scheduler.max_num_seqs * -(-length // block_size)
    total = sizing.affordable(memory, most) if cache.num_blocks is None else cache.num_blocks
    if sizing.grows and (capacity := total * block_size) < length:
        if scheduler.max_model_len is not None or total < 1:
            raise CacheSizeError(_too_small(cache, sizing, length, total, memory))
        _log.warning(
            "The KV cache holds %d tokens, so that max_model_len is reduced to that; the model "
            "supports %d. For longer contexts, give the cache more memory (cache.memory_bytes or "
            "cache.num_blocks; serve --kv-cache-memory).",
            capacity,
            length,
        )
        length = capacity
    if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < length:
        raise CacheSizeError(
            f"Without chunked prefill, a step must take a prompt of max_model_len={length} "
            f"tokens, but max_num_batched_tokens={scheduler.max_num_batched_tokens}. Raise that, "
            "lower max_model_len, or enable chunked prefill."
        )
    blocks = sizing.blocks(min(total, most))
    if (size := sizing.bytes(blocks)) > free:
        asked = f"memory_bytes={memory}" if cache.num_blocks is None else f"num_blocks={total}"
        raise CacheSizeError(
            f"With {asked}, the cache takes {size} bytes, but {free} bytes of memory are free. "
            "Give it less (cache.memory_bytes or cache.num_blocks; serve --kv-cache-memory), or "
            "lower max_num_seqs or max_model_len."
        )
    return CachePlan(blocks, length, block_size)


class _Sizing:
    """The number of blocks of each group, for a number of blocks of groups that keep every token.

    There are states for as many sequences as may run together, if they fit into the memory, or
    into half of it if other layers need memory too.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], block_size: int, scheduler: SchedulerConfig, memory: int
    ) -> None:
        self._groups, self._block_size, self._limits = groups, block_size, scheduler
        states = [g.block_bytes for g in groups if isinstance(g.retention, SequenceState)]
        self.grows = len(states) < len(groups)
        self._slots = 0
        if states:
            share = memory // 2 if self.grows else memory
            # One set of states is the null block's.
            self._slots = min(scheduler.max_num_seqs, share // states[0] - 1)
            if self._slots < 1:
                raise CacheSizeError(
                    f"The states of one sequence take {states[0]} bytes, and there is one more set "
                    f"that nobody owns, but {share} bytes are for states. Give the cache more "
                    "memory (cache.memory_bytes; serve --kv-cache-memory)."
                )

    def blocks(self, total: int) -> tuple[int, ...]:
        """Return the number of blocks of each group; groups that keep every token have *total*."""
        return tuple(self._count(group.retention, total) for group in self._groups)

    def bytes(self, blocks: Sequence[int]) -> int:
        """Return the size of *blocks* of each group in bytes, including null blocks."""
        counts = zip(self._groups, blocks, strict=True)
        return sum(group.block_bytes * (count + 1) for group, count in counts)

    def affordable(self, memory: int, most: int) -> int:
        """Return the largest number of blocks, at most *most*, that fits into *memory*."""
        totals = range(1, most + 1)
        return bisect_right(totals, memory, key=lambda total: self.bytes(self.blocks(total)))

    def _count(self, retention: Retention, total: int) -> int:
        if isinstance(retention, SequenceState):
            return self._slots
        if not isinstance(retention, Window):
            return total
        # The blocks that each sequence keeps and that one step adds; two more for partial blocks.
        per_sequence = -(-retention.size // self._block_size) + 2
        step = -(-self._limits.max_num_batched_tokens // self._block_size)
        return min(total, self._limits.max_num_seqs * per_sequence + step)


def _max_model_len(scheduler: SchedulerConfig, context: int | None) -> int:
    asked = scheduler.max_model_len
    if asked is None:
        return UNBOUNDED_MODEL_LEN if context is None else context
    if context is not None and asked > context:
        raise CacheSizeError(
            f"max_model_len={asked} is more than the model's context of {context} tokens. Lower "
            "it, or leave it out."
        )
    return asked


def _too_small(cache: CacheConfig, sizing: _Sizing, length: int, total: int, memory: int) -> str:
    needed = -(-length // cache.block_size)
    if cache.num_blocks is not None:
        return (
            f"num_blocks={total} of {cache.block_size} tokens do not hold a sequence of "
            f"{length} tokens. Give at least {needed} blocks, or lower max_model_len."
        )
    return (
        f"{memory} bytes of memory hold {total} blocks of {cache.block_size} tokens, but a "
        f"sequence of {length} tokens takes {needed}, which are "
        f"{sizing.bytes(sizing.blocks(needed))} bytes. Give the cache more memory "
        "(cache.memory_bytes; serve --kv-cache-memory), or lower max_model_len."
    )


# The blocks of one group of layers: reference counts, hashes and free list.


NULL_BLOCK = 0  # stands for a block that is not needed; nobody owns it, and nothing writes to it


class BlockPool:
    """Blocks 1 to ``num_blocks``, with a reference count for each.

    A free block with a hash keeps its content, so :meth:`find` returns it until it is allocated
    again. Free blocks without a hash are allocated first, then the others in the order in which
    they were freed.

    Args:
        num_blocks: the number of blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * (num_blocks + 1)
        self._free = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._hash_of: dict[int, bytes] = {}
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate *count* blocks, which must be free, and forget their hashes."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
            if (block_hash := self._hash_of.pop(block, None)) is not None:
                del self._by_hash[block_hash]
        return blocks

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with that hash, if there is one."""
        return self._by_hash.get(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """Remove a hash, so that its block is not found; holders keep the block."""
        block = self._by_hash.pop(block_hash, None)
        if block is not None:
            del self._hash_of[block]
            if block in self._free:  # nothing is lost with it
                self._free.move_to_end(block, last=False)

    def is_free(self, block: int) -> bool:
        """Whether *block* is free."""
        return not self._holders[block]

    def freed_by(self, tables: Iterable[Sequence[int]]) -> set[int]:
        """Return the blocks that would be free if the blocks in *tables* were released."""
        return {block for block, n in _uses(tables).items() if n == self._holders[block]}

    def hold(self, blocks: Iterable[int]) -> None:
        """Increment the reference count of each of *blocks*."""
        for block in blocks:
            if not self._holders[block]:
                del self._free[block]
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Decrement the reference count of each of *blocks*, except null blocks.

        Freed blocks without a hash are reused first, the last one before the others.
        """
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                if block not in self._hash_of:  # nothing is lost with it
                    self._free.move_to_end(block, last=False)

    def name(self, block: int, block_hash: bytes) -> None:
        """Set the hash of a held block, unless another block already has it."""
        if block != NULL_BLOCK and block_hash not in self._by_hash and block not in self._hash_of:
            self._by_hash[block_hash], self._hash_of[block] = block, block_hash

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the reference counts with the blocks that each sequence holds.

        Raises:
            CacheIntegrityError: a block is lost, or its reference count is wrong.
        """
        counts = _uses(tables)
        for block in range(1, self.num_blocks + 1):
            count, holders, is_free = counts[block], self._holders[block], block in self._free
            if count != holders or (not count) != is_free:
                raise CacheIntegrityError(
                    f"Block {block} is in {count} tables, counts {holders} holders, and is "
                    f"{'' if is_free else 'not '}free."
                )
        if {block: block_hash for block_hash, block in self._by_hash.items()} != self._hash_of:
            raise CacheIntegrityError("Hashes and blocks do not lead to each other.")


def _uses(tables: Iterable[Sequence[int]]) -> Counter[int]:
    return Counter(block for table in tables for block in table if block != NULL_BLOCK)


# Allocates cache blocks to requests, and finds cached prefixes.


_NULL_BLOCKS = array("i", [NULL_BLOCK])


class CacheGroup(NamedTuple):
    """Layers with the same retention, which share a block table.

    Attributes:
        retention: which blocks of a sequence they need.
        num_blocks: the number of blocks they have.
    """

    retention: Retention
    num_blocks: int


@dataclass(slots=True)
class _Table:
    """The blocks of one request in one group.

    Attributes:
        blocks: in the order of the tokens; int32.
        dropped: the number of leading blocks that were released.
    """

    blocks: array[int]
    dropped: int = 0


@dataclass(slots=True)
class _Tables:
    """The blocks of one request.

    Attributes:
        groups: the table of each group.
        named: the number of leading blocks with a hash.
        unchanged_up_to: the number of tokens for which the tables need not change.
    """

    groups: list[_Table]
    named: int
    unchanged_up_to: int = 0


class KVCacheManager:
    """Assigns the blocks of each group to requests.

    The first ``request.num_computed_tokens`` of ``request.token_ids`` are in the cache.

    Args:
        groups: of layers.
        block_size: tokens per block.
        enable_prefix_caching: reuse prefixes of earlier requests; needs support by all groups.
    """

    def __init__(
        self, groups: Sequence[CacheGroup], block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self._groups = [(group.retention, BlockPool(group.num_blocks)) for group in groups]
        self._tables: dict[str, _Tables] = {}
        self.shares_prefixes = enable_prefix_caching and all(
            group.retention.shares_prefixes for group in groups
        )

    @property
    def usage(self) -> float:
        """The largest share of blocks in use, over all groups."""
        return max((1 - pool.num_free / pool.num_blocks for _, pool in self._groups), default=0.0)

    def find_prefix(self, request: Request) -> int:
        """Return the number of leading tokens of a waiting request that are cached.

        These are full blocks. The last token is never counted: its logits must be computed.
        """
        if not self.shares_prefixes:
            return 0
        hashes = request.block_hashes
        extend_hashes(hashes, request.token_ids, self.block_size, request.cache_salt)
        count = min(len(hashes), (request.num_tokens - 1) // self.block_size)
        for retention, pool in self._groups:
            if isinstance(retention, EveryToken):
                missing = (i for i in range(count) if pool.find(hashes[i]) is None)
                count = next(missing, count)
        while count and not self._finds(hashes, count):
            count -= 1
        return count * self.block_size

    def fits(
        self, request: Request, num_new: int, prefix: int = 0, *, without: Sequence[Request] = ()
    ) -> bool:
        """Whether there are enough free blocks to start a waiting request.

        Groups that keep every token must have blocks for all of its tokens, so that the request
        is not preempted at once.

        Args:
            request: a request that holds no blocks yet.
            num_new: the number of tokens in its first step.
            prefix: the result of :meth:`find_prefix`.
            without: requests whose blocks count as free.
        """
        for group, (retention, pool) in enumerate(self._groups):
            is_whole = isinstance(retention, EveryToken)
            end = request.num_tokens if is_whole else prefix + num_new
            first = retention.first_block(prefix, self.block_size)
            needed = retention.end_block(end, self.block_size) - first
            shared = self._shared(request, prefix, retention, pool)
            freed = pool.freed_by(self._tables[r.request_id].groups[group].blocks for r in without)
            held = sum(not pool.is_free(block) and block not in freed for block in shared)
            if needed - held > pool.num_free + len(freed):
                return False
        return True

    def allocate(self, request: Request, num_new: int, prefix: int = 0) -> bool:
        """Allocate blocks for the next tokens of *request*: all of them, or none.

        Args:
            request: a running or a waiting request.
            num_new: the number of tokens after the computed ones.
            prefix: for a waiting request, the result of :meth:`find_prefix`.

        Returns:
            Whether there were enough free blocks.
        """
        tables = self._tables.get(request.request_id)
        if tables is None:
            if not self.fits(request, num_new, prefix):
                return False
            tables = self._begin(request, prefix)
        end = max(prefix, request.num_computed_tokens) + num_new
        if end <= tables.unchanged_up_to:
            return True
        missing: list[tuple[BlockPool, _Table, int]] = []
        for (retention, pool), table in zip(self._groups, tables.groups, strict=True):
            first = retention.first_block(request.num_computed_tokens, self.block_size)
            if table.dropped < first:
                pool.release(table.blocks[table.dropped : first])
                table.blocks[table.dropped : first] = _NULL_BLOCKS * (first - table.dropped)
                table.dropped = first
            needed = retention.end_block(end, self.block_size)
            missing.append((pool, table, max(0, needed - len(table.blocks))))
        if any(count > pool.num_free for pool, _, count in missing):
            return False
        for pool, table, count in missing:
            table.blocks.extend(pool.allocate(count))
        tables.unchanged_up_to = min(
            retention.unchanged_up_to(len(table.blocks), table.dropped, self.block_size)
            for (retention, _), table in zip(self._groups, tables.groups, strict=True)
        )
        return True

    def commit(self, request: Request) -> None:
        """Make the request's full computed blocks available to other requests."""
        if not self.shares_prefixes:
            return
        tables, hashes = self._tables[request.request_id], request.block_hashes
        full = request.num_computed_tokens // self.block_size
        if full == tables.named:
            return
        extend_hashes(hashes, request.token_ids, self.block_size, request.cache_salt)
        for (_, pool), table in zip(self._groups, tables.groups, strict=True):
            for index in range(tables.named, full):
                pool.name(table.blocks[index], hashes[index])
        tables.named = full

    def forget(self, request: Request) -> None:
        """Remove the blocks of a request's tokens from the prefix cache.

        Blocks that the request found in the cache are included, since they may be the wrong ones.
        Requests that hold such a block keep it.
        """
        for _, pool in self._groups:
            for block_hash in request.block_hashes:
                pool.forget(block_hash)

    def free(self, request: Request) -> None:
        """Free all blocks of a request, if it holds any."""
        if (tables := self._tables.pop(request.request_id, None)) is not None:
            for (_, pool), table in zip(self._groups, tables.groups, strict=True):
                # The end of a sequence is the least likely to be a prefix of another.
                pool.release(reversed(table.blocks))

    def tables(self, request: Request) -> tuple[Sequence[int], ...]:
        """Return a copy of the block table of each group, in the order of the tokens."""
        return tuple([table.blocks[:] for table in self._tables[request.request_id].groups])

    def check_integrity(self) -> None:
        """Check the block counts.

        Raises:
            CacheIntegrityError: a block is lost, owned twice, or counted wrongly.
        """
        for group, (_, pool) in enumerate(self._groups):
            pool.check(tables.groups[group].blocks for tables in self._tables.values())

    def check_empty(self) -> None:
        """Check the block counts, and that no request holds a block.

        Raises:
            CacheIntegrityError: otherwise.
        """
        self.check_integrity()
        if self._tables:
            raise CacheIntegrityError(f"These hold blocks: {', '.join(self._tables)}.")

    def _finds(self, hashes: Sequence[bytes], count: int) -> bool:
        for retention, pool in self._groups:
            first = retention.first_block(count * self.block_size, self.block_size)
            if any(pool.find(block_hash) is None for block_hash in hashes[first:count]):
                return False
        return True

    def _shared(
        self, request: Request, prefix: int, retention: Retention, pool: BlockPool
    ) -> list[int]:
        """Return the cached blocks of a group that hold the needed part of the prefix."""
        first = retention.first_block(prefix, self.block_size)
        hashes = request.block_hashes[first : prefix // self.block_size]
        return [block for h in hashes if (block := pool.find(h)) is not None]

    def _begin(self, request: Request, prefix: int) -> _Tables:
        count, groups = prefix // self.block_size, []
        for retention, pool in self._groups:
            shared = self._shared(request, prefix, retention, pool)
            pool.hold(shared)
            groups.append(_Table(_NULL_BLOCKS * (count - len(shared)) + array("i", shared)))
        tables = self._tables[request.request_id] = _Tables(groups, count)
        return tables

"""The blocks of the paged KV cache: which requests hold them, and cached prefixes."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

from opweave_engine.errors import EngineError
from opweave_engine.request import Request

# Errors in the cache's bookkeeping, which are bugs of the engine.


class CacheIntegrityError(EngineError):
    """Blocks are owned twice, lost, or counted wrongly."""


# Hashes of blocks of tokens; equal hashes mean that the salt and all tokens up to there match.


_SIZE = 16  # bytes: collisions are out of the question, even if somebody looks for them


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: str | None = None
) -> None:
    """Append the missing hashes of the full blocks of *token_ids* to *hashes*.

    Each hash covers the previous hash and the block's tokens; the first one covers the salt.
    """
    for end in range((len(hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        before = hashes[-1] if hashes else _root(cache_salt)
        tokens = array("q", token_ids[end - block_size : end]).tobytes()
        hashes.append(blake2b(before + tokens, digest_size=_SIZE).digest())


def _root(cache_salt: str | None) -> bytes:
    """Return the bytes that stand for the hash of the block before the first one."""
    if cache_salt is None:
        return b""
    # A client chooses the salt. The personalization keeps its hash apart from those of blocks, so
    # that no salt stands for the tokens of another request.
    salt = cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(salt, digest_size=_SIZE, person=b"cache_salt").digest()


# Retention policies: which blocks of a sequence a group of layers still needs.


class Retention(Protocol):
    """The blocks of a sequence that a group of layers keeps.

    Attributes:
        shares_prefixes: whether other sequences can reuse the blocks of a prefix.
    """

    @property
    def shares_prefixes(self) -> bool: ...

    def first_block(self, num_computed: int, block_size: int) -> int:
        """Return the first block that tokens after the first *num_computed* ones read."""

    def end_block(self, num_tokens: int, block_size: int) -> int:
        """Return the number of blocks that *num_tokens* tokens need, counted from the start."""


@dataclass(frozen=True, slots=True)
class EveryToken:
    """Keeps every token: full attention."""

    shares_prefixes: bool = True

    def first_block(self, num_computed: int, block_size: int) -> int:
        return 0

    def end_block(self, num_tokens: int, block_size: int) -> int:
        return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class Window:
    """Keeps the last *size* tokens, including the current one: a sliding window."""

    size: int
    shares_prefixes: bool = True

    def first_block(self, num_computed: int, block_size: int) -> int:
        return max(0, num_computed + 1 - self.size) // block_size

    def end_block(self, num_tokens: int, block_size: int) -> int:
        return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One state per sequence, regardless of its length: a state-space layer.

    The next token overwrites the state, so other sequences cannot reuse it.
    """

    shares_prefixes: bool = False

    def first_block(self, num_computed: int, block_size: int) -> int:
        return 0

    def end_block(self, num_tokens: int, block_size: int) -> int:
        return 1


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
            if (known := self._hash_of.pop(block, None)) is not None:
                del self._by_hash[known]
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
        given = Counter(block for table in tables for block in table if block != NULL_BLOCK)
        return {block for block, count in given.items() if count == self._holders[block]}

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
        found = [0] * (self.num_blocks + 1)
        for table in tables:
            for block in table:
                found[block] += block != NULL_BLOCK
        for block in range(1, self.num_blocks + 1):
            if found[block] != self._holders[block] or (not found[block]) != (block in self._free):
                raise CacheIntegrityError(
                    f"Block {block} is in {found[block]} tables, counts {self._holders[block]} "
                    f"holders, and is {'' if block in self._free else 'not '}free."
                )
        if {block: known for known, block in self._by_hash.items()} != self._hash_of:
            raise CacheIntegrityError("Hashes and blocks do not lead to each other.")


# Allocates cache blocks to requests, and finds cached prefixes.


class CacheGroup(NamedTuple):
    """Layers with the same retention, which share a block table.

    Attributes:
        retention: which blocks of a sequence they need.
        num_blocks: the number of blocks they have.
    """

    retention: Retention
    num_blocks: int


@dataclass(slots=True)
class _Holding:
    """The blocks of one request, by group.

    Attributes:
        tables: blocks, in the order of the tokens.
        named: the number of leading blocks with a hash.
        dropped: the number of leading blocks that were released.
    """

    tables: list[list[int]]
    named: list[int]
    dropped: list[int]


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
        self._retentions = [group.retention for group in groups]
        self._pools = [BlockPool(group.num_blocks) for group in groups]
        self._holdings: dict[str, _Holding] = {}
        self.shares_prefixes = enable_prefix_caching and all(
            retention.shares_prefixes for retention in self._retentions
        )

    @property
    def usage(self) -> float:
        """The largest share of blocks in use, over all groups."""
        shares = (1 - pool.num_free / pool.num_blocks for pool in self._pools)
        return max(shares, default=0.0)

    def find_prefix(self, request: Request) -> int:
        """Return the number of leading tokens of a waiting request that are cached.

        These are full blocks. The last token is never counted: its logits must be computed.
        """
        if not self.shares_prefixes:
            return 0
        hashes = request.block_hashes
        extend_hashes(hashes, request.token_ids, self.block_size, request.cache_salt)
        count = min(len(hashes), (request.num_tokens - 1) // self.block_size)
        for retention, pool in zip(self._retentions, self._pools, strict=True):
            if isinstance(retention, EveryToken):
                missing = (i for i in range(count) if pool.find(hashes[i]) is None)
                count = next(missing, count)
        while count and not self._finds(hashes, count):
            count -= 1
        return count * self.block_size

    def fits(
        self,
        request: Request,
        num_new_tokens: int,
        prefix: int = 0,
        *,
        without: Sequence[Request] = (),
    ) -> bool:
        """Whether there are enough free blocks to start a waiting request.

        Groups that keep every token must have blocks for all of its tokens, so that the request
        is not preempted at once.

        Args:
            request: a request that holds no blocks yet.
            num_new_tokens: the number of tokens in its first step.
            prefix: the result of :meth:`find_prefix`.
            without: requests whose blocks count as free.
        """
        for group, (retention, pool) in enumerate(zip(self._retentions, self._pools, strict=True)):
            whole = isinstance(retention, EveryToken)
            end = request.num_tokens if whole else prefix + num_new_tokens
            first = retention.first_block(prefix, self.block_size)
            needed = retention.end_block(end, self.block_size) - first
            shared = self._shared(request, prefix, retention, pool)
            freed = pool.freed_by(self._holdings[each.request_id].tables[group] for each in without)
            held = sum(not pool.is_free(block) and block not in freed for block in shared)
            if needed - held > pool.num_free + len(freed):
                return False
        return True

    def allocate(self, request: Request, num_new_tokens: int, prefix: int = 0) -> bool:
        """Allocate blocks for the next tokens of *request*: all of them, or none.

        Args:
            request: a running or a waiting request.
            num_new_tokens: the number of tokens after the computed ones.
            prefix: for a waiting request, the result of :meth:`find_prefix`.

        Returns:
            Whether there were enough free blocks.
        """
        holding = self._holdings.get(request.request_id)
        if holding is None:
            if not self.fits(request, num_new_tokens, prefix):
                return False
            holding = self._begin(request, prefix)
        self._drop_unneeded(request, holding)
        end = max(prefix, request.num_computed_tokens) + num_new_tokens
        missing = [
            retention.end_block(end, self.block_size) - len(table)
            for retention, table in zip(self._retentions, holding.tables, strict=True)
        ]
        if any(n > pool.num_free for n, pool in zip(missing, self._pools, strict=True)):
            return False
        for count, pool, table in zip(missing, self._pools, holding.tables, strict=True):
            table.extend(pool.allocate(max(0, count)))
        return True

    def commit(self, request: Request) -> None:
        """Make the request's full computed blocks available to other requests."""
        holding = self._holdings[request.request_id]
        if not self.shares_prefixes:
            return
        full = request.num_computed_tokens // self.block_size
        extend_hashes(request.block_hashes, request.token_ids, self.block_size, request.cache_salt)
        for group, (pool, table) in enumerate(zip(self._pools, holding.tables, strict=True)):
            for index in range(holding.named[group], full):
                pool.name(table[index], request.block_hashes[index])
            holding.named[group] = full

    def forget(self, request: Request) -> None:
        """Remove the blocks of a request's tokens from the prefix cache.

        Blocks that the request found in the cache are included, since they may be the wrong ones.
        Requests that hold such a block keep it.
        """
        for pool in self._pools:
            for block_hash in request.block_hashes:
                pool.forget(block_hash)

    def free(self, request: Request) -> None:
        """Free all blocks of a request, if it holds any."""
        holding = self._holdings.pop(request.request_id, None)
        if holding is not None:
            for pool, table in zip(self._pools, holding.tables, strict=True):
                # The end of a sequence is the least likely to be a prefix of another.
                pool.release(reversed(table))

    def tables(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """Return the block table of each group, in the order of the tokens."""
        return tuple(tuple(table) for table in self._holdings[request.request_id].tables)

    def check_integrity(self) -> None:
        """Check the block counts.

        Raises:
            CacheIntegrityError: a block is lost, owned twice, or counted wrongly.
        """
        for group, pool in enumerate(self._pools):
            pool.check(holding.tables[group] for holding in self._holdings.values())

    def check_empty(self) -> None:
        """Check the block counts, and that no request holds a block.

        Raises:
            CacheIntegrityError: otherwise.
        """
        self.check_integrity()
        if self._holdings:
            raise CacheIntegrityError(f"These hold blocks: {', '.join(self._holdings)}.")

    def _finds(self, hashes: Sequence[bytes], count: int) -> bool:
        return all(
            pool.find(hashes[index]) is not None
            for retention, pool in zip(self._retentions, self._pools, strict=True)
            for index in range(
                retention.first_block(count * self.block_size, self.block_size), count
            )
        )

    def _shared(
        self, request: Request, prefix: int, retention: Retention, pool: BlockPool
    ) -> list[int]:
        """Return the cached blocks of a group that hold the needed part of the prefix."""
        first = retention.first_block(prefix, self.block_size)
        found = [
            pool.find(block_hash)
            for block_hash in request.block_hashes[first : prefix // self.block_size]
        ]
        return [block for block in found if block is not None]

    def _begin(self, request: Request, prefix: int) -> _Holding:
        count = prefix // self.block_size
        tables = []
        for retention, pool in zip(self._retentions, self._pools, strict=True):
            shared = self._shared(request, prefix, retention, pool)
            pool.hold(shared)
            tables.append([NULL_BLOCK] * (count - len(shared)) + shared)
        groups = len(self._pools)
        holding = _Holding(tables, [count] * groups, [0] * groups)
        self._holdings[request.request_id] = holding
        return holding

    def _drop_unneeded(self, request: Request, holding: _Holding) -> None:
        for group, (retention, pool) in enumerate(zip(self._retentions, self._pools, strict=True)):
            first = retention.first_block(request.num_computed_tokens, self.block_size)
            start, table = holding.dropped[group], holding.tables[group]
            if start < first:
                pool.release(table[start:first])
                table[start:first] = [NULL_BLOCK] * (first - start)
                holding.dropped[group] = first

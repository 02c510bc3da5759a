"""Allocates cache blocks to requests, and finds cached prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from opweave_engine.cache.block_hash import extend_hashes
from opweave_engine.cache.block_pool import NULL_BLOCK, BlockPool
from opweave_engine.cache.errors import CacheIntegrityError
from opweave_engine.cache.retention import EveryToken, Retention
from opweave_engine.request.request import Request


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

"""The blocks of one group of layers: reference counts, hashes and free list."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from opweave_engine.cache.errors import CacheIntegrityError

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

"""Blocks of one group of layers: who holds them, what they contain, which go next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from opweave.engine.cache.errors import CacheIntegrityError

NULL_BLOCK = 0  # stands for a block that is not needed; nobody owns it, and nothing writes to it


class BlockPool:
    """Blocks 1 to ``num_blocks``, with a count of holders for each.

    A block that was given a hash keeps its content when its last holder lets go of it: until it is
    handed out again, :meth:`find` knows it. Those that were let go of first are handed out first.

    Args:
        num_blocks: how many there are.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * (num_blocks + 1)
        self._free = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._hash_of: dict[int, bytes] = {}
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out *count* free blocks, which there must be; what they contained is forgotten."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
            if (known := self._hash_of.pop(block, None)) is not None:
                del self._by_hash[known]
        return blocks

    def find(self, block_hash: bytes) -> int | None:
        """Return the block of that hash, if its content is still there."""
        return self._by_hash.get(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """Find the block of that hash no more; those who hold it keep it."""
        block = self._by_hash.pop(block_hash, None)
        if block is not None:
            del self._hash_of[block]
            if block in self._free:  # nothing is lost with it
                self._free.move_to_end(block, last=False)

    def is_free(self, block: int) -> bool:
        """Whether nobody holds *block*."""
        return not self._holders[block]

    def freed_by(self, tables: Iterable[Sequence[int]]) -> set[int]:
        """Return the blocks that nobody would hold if the holders of *tables* let go of them."""
        given = Counter(block for table in tables for block in table if block != NULL_BLOCK)
        return {block for block, count in given.items() if count == self._holders[block]}

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of *blocks*."""
        for block in blocks:
            if not self._holders[block]:
                del self._free[block]
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take a holder from each of *blocks*, null blocks aside; the last ones go next."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                if block not in self._hash_of:  # nothing is lost with it
                    self._free.move_to_end(block, last=False)

    def name(self, block: int, block_hash: bytes) -> None:
        """Say what a held block contains, unless another block is known to contain the same."""
        if block != NULL_BLOCK and block_hash not in self._by_hash and block not in self._hash_of:
            self._by_hash[block_hash], self._hash_of[block] = block, block_hash

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare with the blocks that each sequence holds.

        Raises:
            CacheIntegrityError: a block is lost, or has more or fewer holders than it counts.
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

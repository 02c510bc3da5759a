"""The rows of a vocabulary table on one rank, and their ids."""

from __future__ import annotations

from dataclasses import dataclass

from opweave.layers.errors import LayerArgumentError
from opweave.layers.parallel import TensorParallel


def pad_vocab_size(size: int, multiple: int) -> int:
    """Return *size*, rounded up to a multiple.

    >>> pad_vocab_size(1010, 64)
    1024
    """
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class VocabShard:
    """The rows of one rank: base ids, padding, added ids, padding.

    Base and added ids are sharded separately, so that base ids stay on their rank when ids are
    added. A single rank has the same order of rows.

    Attributes:
        org_vocab_size, num_added: the numbers of base ids and of added ids.
        org_rows, added_rows: a rank's numbers of rows for them, including padding.
        org_start, org_end: the base ids of this rank.
        added_start, added_end: its added ids.
        size: the number of ranks.
    """

    org_vocab_size: int
    num_added: int
    org_rows: int
    added_rows: int
    org_start: int
    org_end: int
    added_start: int
    added_end: int
    size: int

    @classmethod
    def of(
        cls, num_embeddings: int, org_vocab_size: int, padding_size: int, parallel: TensorParallel
    ) -> VocabShard:
        """Shard a table of *num_embeddings* ids, of which *org_vocab_size* are base ids.

        Raises:
            LayerArgumentError: there are more base ids than ids, or *padding_size* is not positive.
            ShardingError: the number of ranks does not divide the padded sizes.
        """
        if not 0 < org_vocab_size <= num_embeddings or padding_size < 1:
            raise LayerArgumentError(
                f"num_embeddings={num_embeddings} is the number of all ids, "
                f"org_num_embeddings={org_vocab_size} that of those that were not added, and "
                f"padding_size={padding_size} is at least 1."
            )
        org = pad_vocab_size(org_vocab_size, padding_size)
        added = num_embeddings - org_vocab_size
        total = pad_vocab_size(org + added, padding_size)
        padded = f"padded to a multiple of {padding_size}"
        org_rows = parallel.divide(org, f"the vocabulary ({padded})")
        added_rows = parallel.divide(total - org, f"the added vocabulary ({padded})")

        def owned(rows: int, first: int, count: int) -> tuple[int, int]:
            start, end = (min(rows * rank, count) for rank in (parallel.rank, parallel.rank + 1))
            return first + start, first + end

        return cls(
            org_vocab_size,
            added,
            org_rows,
            added_rows,
            *owned(org_rows, 0, org_vocab_size),
            *owned(added_rows, org_vocab_size, added),
            parallel.size,
        )

    @property
    def rows(self) -> int:
        """The number of rows of this rank."""
        return self.org_rows + self.added_rows

    @property
    def num_org(self) -> int:
        """The number of base ids of this rank."""
        return self.org_end - self.org_start

    @property
    def num_added_here(self) -> int:
        """The number of added ids of this rank."""
        return self.added_end - self.added_start

    def order(self) -> list[int]:
        """Return, for each row of the whole table, its index in the ranks' concatenated rows.

        The table has base ids, then added ids, then padding: element ``i`` is the row of id ``i``.
        """
        base = [rank * self.rows + row for rank in range(self.size) for row in range(self.org_rows)]
        added = [
            rank * self.rows + self.org_rows + row
            for rank in range(self.size)
            for row in range(self.added_rows)
        ]
        org, more = self.org_vocab_size, self.num_added
        return base[:org] + added[:more] + base[org:] + added[more:]

"""Base class of models that compute a vector for every token of a text."""

from __future__ import annotations

from opweave_engine.models.weights import CheckpointModel


class Encoder(CheckpointModel):
    """A model whose forward takes ids and positions of packed texts, and ``cu_seqlens=``.

    ``cu_seqlens`` is ``(texts + 1,)``, int32: the start of each text, and the end of the last. The
    result is ``(T, hidden_size)``.
    """

    @property
    def hidden_size(self) -> int:
        """The size of a vector."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary."""
        raise NotImplementedError

    @property
    def max_positions(self) -> int:
        """The longest text, in tokens."""
        raise NotImplementedError

"""Stateful layers, and their names, which are unique within a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count

import torch

from opweave.layers.errors import DuplicateLayerError
from opweave.layers.pluggable_layer import PluggableLayer

_nameless = count()
_layers: ContextVar[dict[str, StatefulLayer] | None] = ContextVar(
    "opweave_stateful_layers", default=None
)


class StatefulLayer(PluggableLayer):
    """A layer that keeps a state of the earlier tokens for every sequence.

    Args:
        prefix: the name of this layer in its model, which identifies its states in the cache; by
            default a unique name.

    Attributes:
        state_shapes: the shape of a sequence's state on this rank, by kind.

    Raises:
        DuplicateLayerError: the model has another layer of that name.
    """

    state_shapes: Mapping[str, tuple[int, ...]]

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix or f"{type(self).__name__}#{next(_nameless)}"
        layers = _layers.get()
        if layers is None:
            return
        if self.prefix in layers:
            raise DuplicateLayerError(
                f"Duplicate layer name: {self.prefix!r}. Two layers of one model cannot keep their "
                "states under one name; give each its own prefix."
            )
        layers[self.prefix] = self


@contextmanager
def stateful_layers() -> Iterator[dict[str, StatefulLayer]]:
    """Collect the stateful layers of the model that is built inside the block, by name."""
    found: dict[str, StatefulLayer] = {}
    token = _layers.set(found)
    try:
        yield found
    finally:
        _layers.reset(token)


def state_dtype(dtype: torch.dtype, kind: str) -> torch.dtype:
    """Return the dtype of the states of *kind* for activations of *dtype*.

    Convolution inputs keep their dtype. Scan states, which accumulate over a whole sequence, have
    at least float32.
    """
    return dtype if kind == "conv" else torch.promote_types(dtype, torch.float32)

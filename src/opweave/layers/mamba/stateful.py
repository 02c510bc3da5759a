"""Names of layers that keep states: unique within a model, so that no two share a state."""

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
        prefix: the name of this layer in its model, by which the cache knows it; by default a name
            that no other layer has.

    Attributes:
        state_shapes: the shape of one sequence's state of each kind, on this rank.

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
    """Collect the layers that are built inside the block, which is one model, by their names."""
    found: dict[str, StatefulLayer] = {}
    token = _layers.set(found)
    try:
        yield found
    finally:
        _layers.reset(token)


def state_dtype(dtype: torch.dtype, kind: str) -> torch.dtype:
    """Return the dtype in which states of one *kind* are kept where activations have *dtype*.

    Convolution inputs keep their dtype. Scan states, which accumulate over a whole sequence, have
    at least float32.
    """
    return dtype if kind == "conv" else torch.promote_types(dtype, torch.float32)

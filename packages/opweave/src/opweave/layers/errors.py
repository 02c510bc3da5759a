"""Errors of the layers, one class per condition.

Each message says what failed, what was given, what is accepted and how to fix it.
"""

from __future__ import annotations

from opweave.ir.errors import OpweaveError


class LayerError(OpweaveError):
    """Base class of the errors of :mod:`opweave.layers`."""


class LayerNameError(LayerError, ValueError):
    """The name for a layer is not an identifier, or is reserved."""


class DuplicateLayerError(LayerError, ValueError):
    """The name or index of a layer is taken, or a class already has a replacement."""


class InvalidLayerError(LayerError, TypeError):
    """A registered object is not a layer."""


class ReplacementError(LayerError, TypeError):
    """A layer cannot replace the class that it is registered for."""


class LayerArgumentError(LayerError, ValueError):
    """The arguments of a layer are invalid or contradict each other."""


class LayerCallError(LayerError, RuntimeError):
    """A layer was called that cannot be called, because only other layers use it."""


class ShardingError(LayerError, ValueError):
    """A dimension cannot be sharded over the ranks, or a rank is out of range."""


class WeightLoadError(LayerError, ValueError):
    """The shape of a loaded weight is neither that of the parameter nor that of a rank's shard."""


class UnusedOpWarning(UserWarning):
    """``custom_ops`` or a replacement names a layer that the model does not have."""

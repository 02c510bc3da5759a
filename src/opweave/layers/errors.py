"""Every error of the layers, one class per condition.

Each message says what was asked, what was found, what is possible, and how to fix it.
"""

from __future__ import annotations

from opweave.ir.errors import OpweaveError


class LayerError(OpweaveError):
    """Base class of everything that :mod:`opweave.layers` raises on purpose."""


class LayerNameError(LayerError, ValueError):
    """A layer is to be registered under a name that it cannot have."""


class DuplicateLayerError(LayerError, ValueError):
    """Another layer has the name, or the index, already; or the class has another replacement."""


class InvalidLayerError(LayerError, TypeError):
    """A registered object is not a layer."""


class ReplacementError(LayerError, TypeError):
    """A layer cannot take the place of the class that it is registered for."""


class LayerArgumentError(LayerError, ValueError):
    """A layer is built or called with arguments that do not fit each other."""


class LayerCallError(LayerError, RuntimeError):
    """A layer is called that other layers use, and that computes nothing by itself."""


class ShardingError(LayerError, ValueError):
    """A dimension cannot be divided over the ranks, or a rank is out of range."""


class WeightLoadError(LayerError, ValueError):
    """A loaded weight fits neither the whole parameter nor this rank's part of it."""


class UnusedOpWarning(UserWarning):
    """``custom_ops`` names an op that the model does not have, or a replacement is of no layer."""

"""Errors of model configurations."""

from __future__ import annotations

from opweave.ir.errors import OpweaveError, UnknownError


class ModelError(OpweaveError):
    """Base class of the errors of :mod:`opweave_engine.models`."""


class InvalidConfigError(ModelError, ValueError):
    """A value in a checkpoint's ``config.json`` is missing, of the wrong type, or impossible."""


class UnsupportedModelError(UnknownError, ModelError, ValueError):
    """The configuration has an unsupported architecture or feature."""


class WeightsError(ModelError, ValueError):
    """A checkpoint's tensors are missing, unexpected, or have the wrong shape."""


class DuplicateModelError(ModelError, ValueError):
    """An architecture already has a model."""


class InvalidModelError(ModelError, TypeError):
    """A registered model cannot be imported, or is not a model."""

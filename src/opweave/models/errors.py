"""Errors of model configurations."""

from __future__ import annotations

from opweave.ir.errors import OpweaveError, UnknownError


class ModelError(OpweaveError):
    """Base class of every error that :mod:`opweave.models` raises on purpose."""


class InvalidConfigError(ModelError, ValueError):
    """A value in a checkpoint's ``config.json`` is missing, of the wrong type, or impossible."""


class UnsupportedModelError(UnknownError, ModelError, ValueError):
    """The configuration asks for an architecture or a feature that no model here has."""


class WeightsError(ModelError, ValueError):
    """A checkpoint's tensors are not those of the model: some are missing, or do not fit."""


class DuplicateModelError(ModelError, ValueError):
    """An architecture has a model already."""


class InvalidModelError(ModelError, TypeError):
    """A registered model cannot be imported, or is not a model."""

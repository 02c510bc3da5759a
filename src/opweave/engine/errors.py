"""What a user of the engine can get wrong: one class for each condition."""

from __future__ import annotations

from opweave.ir.errors import OpweaveError


class EngineError(OpweaveError):
    """Base class of every error that :mod:`opweave.engine` raises on purpose."""


class CheckpointError(EngineError):
    """A checkpoint directory is missing, incomplete, damaged, or does not fit the model."""


class TokenizerError(EngineError):
    """A tokenizer is missing or damaged."""


class MissingDependencyError(EngineError, ImportError):
    """An optional dependency is not installed."""


class InvalidArgumentError(EngineError, ValueError):
    """An argument of the engine has a value that it cannot have."""


class SamplingParamsError(EngineError, ValueError):
    """A sampling parameter is out of range or of the wrong type."""


class PromptError(EngineError, ValueError):
    """A prompt is empty, too long, or not made of this model's tokens."""


class NonFiniteLogitsError(EngineError):
    """The model produced scores that are not numbers."""

"""What a user of the engine can get wrong: one class for each condition."""

from __future__ import annotations

from collections.abc import Sequence

from opweave.ir.errors import OpweaveError


class EngineError(OpweaveError):
    """Base class of every error that :mod:`opweave.engine` raises on purpose."""


class CheckpointError(EngineError):
    """A checkpoint directory is missing, incomplete, damaged, or does not fit the model."""


class TokenizerError(EngineError):
    """A tokenizer is missing or damaged."""


class MissingDependencyError(EngineError, ImportError):
    """An optional dependency is not installed."""


class RequestError(EngineError, ValueError):
    """Base class of errors in what a caller asked for.

    Attributes:
        parameter: the name of the parameter that is wrong, or None.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class InvalidArgumentError(RequestError):
    """An argument of the engine has a value that it cannot have."""


class UnexpectedKeywordError(InvalidArgumentError, TypeError):
    """A keyword argument does not exist."""


class SamplingParamsError(RequestError):
    """A sampling parameter is out of range or of the wrong type."""


class PromptError(RequestError):
    """A prompt is empty, too long, or not made of this model's tokens."""


class ChatTemplateError(RequestError):
    """A chat template is missing, is not valid Jinja, or refuses the messages."""


class NonFiniteLogitsError(EngineError):
    """The model produced logits that are NaN or infinite.

    Attributes:
        rows: of the scores, those that are not.
    """

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class NoTokenLeftError(NonFiniteLogitsError, ValueError):
    """The parameters of a request leave no token to choose."""


class EngineDeadError(EngineError):
    """The engine stopped, of an error or because it was shut down, and takes no requests."""


class RankFailedError(EngineDeadError):
    """A rank of a tensor-parallel engine died, hung, or refused to start."""


class ReplicaFailedError(EngineDeadError):
    """A replica of a data-parallel engine died, hung, or refused to start."""


class CommunicatorError(EngineError):
    """A collective failed: a rank did not come, cannot be reached, or brought something else."""


class CacheSizeError(EngineError, ValueError):
    """The cache of keys and values cannot hold what it must."""


class UnsupportedCacheError(EngineError):
    """No attention backend, or not this one, can keep the cache that a layer needs."""

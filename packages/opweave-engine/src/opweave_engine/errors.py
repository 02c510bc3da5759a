"""Errors of the engine, one class for each condition, and optional dependencies."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from opweave.ir.errors import OpweaveError

# Errors of the engine, one class for each condition.


class EngineError(OpweaveError):
    """Base class of every error that :mod:`opweave_engine` raises on purpose."""


class CheckpointError(EngineError):
    """A checkpoint directory is missing, incomplete, damaged, or does not fit the model."""


class TokenizerError(EngineError):
    """A tokenizer is missing or damaged."""


class MissingDependencyError(EngineError, ImportError):
    """An optional dependency is not installed."""


class RequestError(EngineError, ValueError):
    """Base class of errors in a request's arguments.

    Attributes:
        parameter: the name of the invalid parameter, or None.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class InvalidArgumentError(RequestError):
    """An argument of the engine has an invalid value."""


class UnexpectedKeywordError(InvalidArgumentError, TypeError):
    """A keyword argument does not exist."""


class SamplingParamsError(RequestError):
    """A sampling parameter is out of range or of the wrong type."""


class PromptError(RequestError):
    """A prompt is empty, too long, or has token ids outside the vocabulary."""


class ChatTemplateError(RequestError):
    """A chat template is missing, is not valid Jinja, or rejects the messages."""


class GrammarQueueFullError(EngineError):
    """A grammar had to wait too long for others, or others take too much memory."""


class NonFiniteLogitsError(EngineError):
    """The model produced logits that are NaN or infinite.

    Attributes:
        rows: the rows with such logits.
    """

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class NoTokenLeftError(NonFiniteLogitsError, ValueError):
    """The parameters of a request exclude every token."""


class EngineDeadError(EngineError):
    """The engine died or was shut down, and takes no requests."""


class RankFailedError(EngineDeadError):
    """A rank of a tensor-parallel engine died, hung, or refused to start."""


class ReplicaFailedError(EngineDeadError):
    """A replica of a data-parallel engine died, hung, or refused to start."""


class CommunicatorError(EngineError):
    """A collective failed: a rank is missing, unreachable, or called another collective."""


class CacheSizeError(EngineError, ValueError):
    """The KV cache is too small."""


class UnsupportedCacheError(EngineError):
    """The attention backends do not support the cache that a layer needs."""


def id_in_use(request_id: str) -> InvalidArgumentError:
    """Return the error for a request with the name of an unfinished one."""
    return InvalidArgumentError(
        f"request_id={request_id!r} is in use by a request that is not finished."
    )


# Optional dependencies, imported where they are needed.


def require(name: str, extra: str = "") -> Any:
    """Import and return module *name*, a dependency of opweave-engine, or of its extra *extra*.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"opweave's engine needs {name.partition('.')[0]!r}, which cannot be imported "
            f"({error}). Install it with: pip install "
            + (f"'opweave-engine[{extra}]'" if extra else "opweave-engine")
        ) from error

"""Errors that are opweave's, and also of the built-in class that vLLM raises there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opweave.ir import errors

_BUILT_IN: dict[type[errors.IrError], type[Exception]] = {
    errors.DonationError: AssertionError,
    errors.DuplicateImplError: AssertionError,
    errors.DuplicateOpError: AssertionError,
    errors.InvalidNameError: AssertionError,
    errors.InvalidOpError: AssertionError,
    errors.MissingInputGeneratorError: RuntimeError,
    errors.MissingToleranceError: ValueError,
    errors.UnknownProviderError: AssertionError,
}

_BOTH: dict[type, type[Exception]] = {
    kind: type(kind.__name__, (kind, built_in), {"__doc__": kind.__doc__})
    for kind, built_in in _BUILT_IN.items()
}


@contextmanager
def as_in_vllm() -> Iterator[None]:
    """Let an error of the block also be caught by the class that code written for vLLM expects."""
    try:
        yield
    except tuple(_BUILT_IN) as error:
        if type(error) not in _BOTH:  # it is one of _BOTH already
            raise
        raise _BOTH[type(error)](*error.args) from error

"""Errors that derive from opweave's and from the built-in class that vLLM raises."""

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
    """Convert errors of the block so that ``except`` with vLLM's built-in class catches them."""
    try:
        yield
    except tuple(_BUILT_IN) as error:
        if type(error) not in _BOTH:  # already converted
            raise
        raise _BOTH[type(error)](*error.args) from error

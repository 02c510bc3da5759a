"""Arguments from an op's input generator: sizes with and without tails, dtypes, no tokens."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from opweave.conformance.case import Case
from opweave.conformance.subject import Subject

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TOKENS = (1, 2, 3, 7, 8, 33)
_MANY_TOKENS = (130, 257, 1031, 4099)
_WIDTHS = (1, 2, 3, 8, 17, 31, 62, 66, 129, 1000, 4097)
_COUNTS = (1, 2, 3, 5, 8)
_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
_WIDE = 24  # from here on a size is the width of a row, below it a number of heads or blocks
_SLOW = 0.1  # seconds; larger numbers of tokens are left out from here on


def options_of(subject: Subject) -> dict[str, Any]:
    """Return the options of the op's input generator with their defaults."""
    parameters = inspect.signature(subject.op.input_generator).parameters
    return {name: p.default for name, p in parameters.items()}


def generated(subject: Subject, **options: Any) -> Case | None:
    """Return a case from the generator, or None if it does not take the options."""
    known = options_of(subject)
    if not options.keys() <= known.keys():
        return None
    device = {"device": subject.device} if "device" in known else {}
    try:
        values = subject.op.bind(*subject.op.generate_inputs(**options, **device))
    except (ValueError, RuntimeError, ZeroDivisionError, IndexError, TypeError):
        return None  # sizes that do not fit each other
    return Case(subject.op, _label(options), values)


def usual(subject: Subject, dtypes: int | None = None) -> Iterator[Case]:
    """Yield one case for each dtype, or for so many of them."""
    for dtype in _dtype_options(subject)[:dtypes]:
        yield from _existing(subject, dtype)


def sizes(subject: Subject) -> Iterator[Case]:
    """Yield cases of every dtype and many sizes."""
    for dtype in _dtype_options(subject):
        yield from _tokens(subject, dtype)
        for name, default in options_of(subject).items():
            yield from _variants(subject, name, default, dtype)


def empty(subject: Subject) -> Iterator[Case]:
    """Yield cases without tokens."""
    if "num_tokens" in options_of(subject):
        for dtype in _dtype_options(subject):
            yield from _existing(subject, {"num_tokens": 0, **dtype})


def _dtype_options(subject: Subject) -> list[dict[str, Any]]:
    """Return the options that lead to each dtype."""
    if "dtype" not in options_of(subject):
        return [{}]
    return [{"dtype": dtype} for dtype in DTYPES]


def _tokens(subject: Subject, dtype: Mapping[str, Any]) -> Iterator[Case]:
    if "num_tokens" not in options_of(subject):
        return
    for count in _TOKENS + _MANY_TOKENS:
        start = time.perf_counter()
        yield from _existing(subject, {"num_tokens": count, **dtype})
        if time.perf_counter() - start > _SLOW:  # what was done with the case included
            return


def _variants(
    subject: Subject, name: str, default: Any, dtype: Mapping[str, Any]
) -> Iterator[Case]:
    """Yield cases with other values of one option of the generator."""
    if name in ("num_tokens", "dtype", "device"):
        return
    values: tuple[Any, ...] = ()
    if isinstance(default, torch.dtype):
        values = _EIGHT_BITS if default.itemsize == 1 else DTYPES
    elif isinstance(default, bool):
        values = (not default,)
    elif isinstance(default, int):
        values = _WIDTHS if default >= _WIDE else _COUNTS
        values = tuple(sorted({*values, 2 * default} - {default}))
    for value in values:
        yield from _existing(subject, {name: value, **dtype})


def _existing(subject: Subject, options: Mapping[str, Any]) -> Iterator[Case]:
    case = generated(subject, **options)
    if case is not None:
        yield case


def _label(options: Mapping[str, Any]) -> str:
    parts = (f"{k}={str(v).removeprefix('torch.')}" for k, v in options.items())
    return ", ".join(parts) or "usual"


def accepts_any(subject: Subject) -> bool:
    """Whether the implementation accepts any of the usual arguments."""
    return any(case.refusal is None and subject.accepts(case.values) for case in usual(subject))

"""Arguments from an op's input generator: sizes with and without tails, dtypes, no tokens."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from opweave.conformance.case import Case
from opweave.conformance.memory import Values
from opweave.conformance.subject import Subject

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOKENS = (1, 2, 3, 7, 8, 33)
_MANY_TOKENS = (130, 257, 1031, 4099)
_WIDTHS = (1, 2, 3, 8, 17, 31, 62, 64, 66, 128, 129, 256, 1000, 4096, 4097)
_COUNTS = (1, 2, 3, 5, 8)
_SIZES = (*_COUNTS, 32, 64, 80, 96, 128, 256)  # of a head, a state, a block
_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
WIDE = 24  # from here on a size is the width of a row, below it of a part of one, or a number
_EVERY = (*range(1, 131), 255, 257, 511, 513, 1023, 1025)  # sizes, block bounds among them
_SWEEP = 2.0  # seconds of processor time for the sizes of one option
_SLOW = 0.1  # seconds; larger numbers of tokens are left out from here on


def options_of(subject: Subject) -> dict[str, Any]:
    """Return the options of the op's input generator with their defaults."""
    parameters = inspect.signature(subject.op.input_generator).parameters
    return {name: p.default for name, p in parameters.items()}


def arguments(subject: Subject, **options: Any) -> Values:
    """Return the inputs of the op's generator for the options; its exceptions pass through."""
    device = {"device": subject.device} if "device" in options_of(subject) else {}
    args = subject.op.generate_inputs(**{**dict(subject.options), **options}, **device)
    return subject.op.bind(*args)


def generated(subject: Subject, **options: Any) -> Case | None:
    """Return a case from the generator, or None if it does not accept the options."""
    if not options.keys() <= options_of(subject).keys():
        return None
    try:
        values = arguments(subject, **options)
    except (ValueError, RuntimeError, ZeroDivisionError, IndexError, TypeError):
        return None  # sizes that do not fit each other
    return Case(subject.op, _label({**dict(subject.options), **options}), values)


def usual(subject: Subject, dtypes: int | None = None) -> Iterator[Case]:
    """Yield one case for each dtype, or for a limited number of them."""
    for dtype in _dtype_options(subject)[:dtypes]:
        yield from _existing(subject, dtype)


def sizes(subject: Subject) -> Iterator[Case]:
    """Yield cases of every dtype and many sizes."""
    for dtype in _dtype_options(subject):
        yield from _tokens(subject, dtype)
        for name, default in options_of(subject).items():
            yield from _variants(subject, name, default, dtype)
    for name, default in options_of(subject).items():
        if name == "num_tokens" or (type(default) is int and default >= WIDE):
            yield from _swept(subject, name)


def while_fast(cases: Iterable[Case]) -> Iterator[Case]:
    """Yield *cases* until one takes too long, including the time of its consumer."""
    start = time.perf_counter()
    for case in cases:
        yield case
        if time.perf_counter() - start > _SLOW:
            return
        start = time.perf_counter()


def few_and_many(subject: Subject) -> Iterator[Case]:
    """Yield cases with one token, and with more tokens than one tile or thread processes."""
    for count in (1, 33, 257):
        yield from _existing(subject, {"num_tokens": count})


def of_several_sizes(subject: Subject) -> Iterator[Case]:
    """Yield the usual cases, and those of few and of many tokens."""
    yield from usual(subject)
    yield from few_and_many(subject)


def empty(subject: Subject) -> Iterator[Case]:
    """Yield cases without tokens."""
    yield from of_tokens(subject, 0)


def of_tokens(subject: Subject, count: int) -> Iterator[Case]:
    """Yield one case of *count* tokens for each dtype."""
    for dtype in _dtype_options(subject):
        yield from _existing(subject, {"num_tokens": count, **dtype})


def _dtype_options(subject: Subject) -> list[dict[str, Any]]:
    """Return the options that lead to each dtype."""
    if "dtype" not in options_of(subject):
        return [{}]
    return [{"dtype": dtype} for dtype in DTYPES]


def _tokens(subject: Subject, dtype: Mapping[str, Any]) -> Iterator[Case]:
    if "num_tokens" not in options_of(subject):
        return
    for count in TOKENS:
        start = time.perf_counter()
        yield from _existing(subject, {"num_tokens": count, **dtype})
    for count in _MANY_TOKENS:
        if time.perf_counter() - start > _SLOW:  # what was done with the case before included
            return
        start = time.perf_counter()
        yield from _existing(subject, {"num_tokens": count, **dtype})


def _swept(subject: Subject, name: str) -> Iterator[Case]:
    """Yield cases of every size of one option in a drawn order, as many as there is time for."""
    dtypes, start = _dtype_options(subject), time.process_time()
    for place in torch.randperm(len(_EVERY)).tolist():
        if time.process_time() - start > _SWEEP:
            return
        yield from _existing(subject, {name: _EVERY[place], **dtypes[place % len(dtypes)]})


def _variants(
    subject: Subject, name: str, default: Any, dtype: Mapping[str, Any]
) -> Iterator[Case]:
    """Yield cases with other values of one option of the generator."""
    for value in variants(name, default):
        yield from _existing(subject, {name: value, **dtype})


def variants(name: str, default: Any) -> tuple[Any, ...]:
    """Return the values to try of an option of the generator instead of its default."""
    if name in ("num_tokens", "dtype", "device"):
        return ()
    if isinstance(default, torch.dtype):
        return _EIGHT_BITS if default.itemsize == 1 else DTYPES
    if isinstance(default, bool):
        return (not default,)
    if isinstance(default, int):
        return tuple(sorted({*_numbers(name, default), 2 * default} - {default}))
    return ()


def _numbers(name: str, default: int) -> tuple[int, ...]:
    if default >= WIDE:
        return _WIDTHS
    return _SIZES if name.endswith("size") else _COUNTS


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


def with_accepted_sizes(subject: Subject) -> Subject | None:
    """Return *subject* with options of the generator for which it accepts the usual arguments.

    A kernel may support only some sizes. One option is changed at a time. None: no option helps.
    """
    changes: list[dict[str, Any]] = [{}]
    for name, default in options_of(subject).items():
        changes += [{name: value} for value in variants(name, default)]
    for change in changes:
        options = tuple({**dict(subject.options), **change}.items())
        tried = replace(subject, options=options)
        if accepts_any(tried):
            return tried
    return None

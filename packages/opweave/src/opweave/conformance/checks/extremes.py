"""Extreme numbers: zeros, other distributions, the smallest and largest, NaN and infinity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opweave.conformance import inputs
from opweave.conformance.case import Case, outputs_of
from opweave.conformance.check import Check, Finding, each, not_native
from opweave.conformance.compare import near_problem, structure_problem, tolerance_of
from opweave.conformance.memory import copied
from opweave.conformance.subject import Subject
from opweave.ir.tolerance import Tolerance


def _with_one(number: float, place: float = 1 / 3) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        changed = t.clone()
        changed.view(-1)[int(place * (t.numel() - 1))] = number
        return changed

    return change


def _with_row(number: float) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        changed = t.clone()
        rows = changed.view(-1, t.shape[-1]) if t.ndim else changed
        rows[len(rows) // 2 :][:1] = number
        return changed

    return change


def _scaled_to(largest: Callable[[torch.dtype], float]) -> Callable[[Tensor], Tensor]:
    return lambda t: t / t.abs().amax().clamp(min=1e-3) * largest(t.dtype)


def _large(dtype: torch.dtype) -> float:
    """Return a number whose square overflows in 16 bits, and of whose squares float32 adds many."""
    return max(math.sqrt(torch.finfo(dtype).max) / 16, 1000.0)


EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "all zeros": torch.zeros_like,
    "all equal": torch.ones_like,
    "uniform": lambda t: torch.rand(t.shape, device=t.device).to(t.dtype) - 0.5,
    "positive": lambda t: t.abs() + 0.5,
    "mostly zeros": lambda t: torch.where(torch.rand(t.shape, device=t.device) < 0.9, 0.0, t),
    "a NaN": _with_one(float("nan")),
    "first a NaN": _with_one(float("nan"), 0),
    "last a NaN": _with_one(float("nan"), 1),
    "an infinity": _with_one(float("inf")),
    "last an infinity": _with_one(float("inf"), 1),
    "a negative infinity": _with_one(float("-inf")),
    "a row of NaN": _with_row(math.nan),
    "a row of infinity": _with_row(math.inf),
    "a row of negative infinity": _with_row(-math.inf),
    "tiny": _scaled_to(lambda dtype: torch.finfo(dtype).tiny / 4),
    "up to a hundred": _scaled_to(lambda dtype: 100.0),
    "large": _scaled_to(_large),
}
_OF_MANY = ("up to a hundred", "large")  # for which a large tensor may be treated otherwise
_MANY_TOKENS = 257
_SHAKES, _UNITS = 4, 8  # how often arguments are rounded otherwise, and by how much

_INFINITE = (
    "an infinity",
    "last an infinity",
    "a negative infinity",
    "a row of infinity",
    "a row of negative infinity",
)

# A fused softmax takes a query without a finite score for one without a key, and adds a mask to the
# score of a key that is not seen: attention leaves it open what comes of NaN and infinity.
_OPEN = ("a NaN", "first a NaN", "last a NaN", "a row of NaN", *_INFINITE)


def _left_open(subject: Subject) -> tuple[str, ...]:
    return _OPEN if "attention" in subject.op.name else ()


def extreme(subject: Subject) -> Iterator[Case]:
    """Yield cases with extreme numbers in one argument at a time."""
    names = [name for name in EXTREMES if name not in _left_open(subject)]
    for base in inputs.usual(subject):
        yield from _changed(subject, base, names)
    for base in inputs.of_tokens(subject, _MANY_TOKENS):
        yield from inputs.while_fast(_changed(subject, base, _OF_MANY))


def _changed(subject: Subject, base: Case, names: Sequence[str]) -> Iterator[Case]:
    for i, value in enumerate(base.values):
        if not isinstance(value, Tensor) or not value.numel() or value.dtype not in _FLOATS:
            continue
        for name in names:
            values = [EXTREMES[name](v) if j == i else v for j, v in enumerate(base.values)]
            yield base.with_values(f"{subject.op.schema.names[i]}: {name}", values)


_FLOATS = inputs.DTYPES


def _survives(subject: Subject, case: Case) -> Finding:
    """Check that outputs are NaN where native is, and finite where native and the reference are."""
    result = subject.run(copied(case.values))
    problem = structure_problem(case.native, result)
    if problem:
        return problem
    parts = zip(outputs_of(result), case.native, case.reference, strict=True)
    for i, (found, native, reference) in enumerate(parts):
        if not native.is_floating_point():
            problem = near_problem(found, native, tolerance_of(case, native))
        elif native.dtype.itemsize == 1:
            problem = _of_codes(case, i, found)
        else:
            problem = _of_floats(case, found, native, reference)
        if problem:
            return f"output {i}: {problem}"
    return None


def _of_codes(case: Case, place: int, found: Tensor) -> Finding:
    """Compare codes of 8 bits where they do not depend on the rounding of the arguments.

    Where large terms cancel, an error that the terms justify may be any code.
    """
    native = case.native[place]
    tolerance = tolerance_of(case, native)
    stable = torch.ones_like(native, dtype=torch.bool)
    for _ in range(_SHAKES):
        shaken = case.with_values("shaken", [_shaken(v) for v in case.values]).native[place]
        stable &= torch.isclose(
            native.float(), shaken.float(), atol=tolerance.atol, rtol=tolerance.rtol, equal_nan=True
        )
    return near_problem(found[stable], native[stable], tolerance) if stable.any() else None


def _shaken(value: Any) -> Any:
    """Return numbers with an error of some units in the last place."""
    if not isinstance(value, Tensor) or value.dtype not in _FLOATS:
        return value
    factors = 1 + _UNITS * torch.finfo(value.dtype).eps * (2 * torch.rand(value.shape) - 1)
    return (value * factors.to(value.device, torch.float64)).to(value.dtype)


def _of_floats(case: Case, found: Tensor, native: Tensor, reference: Tensor) -> Finding:
    # Intermediate overflow and infinity times zero are up to the implementation: a result must be a
    # number only if both definitions return one.
    lost = native.isnan() & reference.isnan() & ~found.isnan()
    is_infinite = case.label.endswith(_INFINITE)
    if lost.any() and not is_infinite:
        return f"{int(lost.sum())} NaN of native's {int(native.isnan().sum())} are lost"
    rounded = reference.to(native.dtype)
    kept = (native == rounded) & native.isinf()
    if is_infinite and (found != native)[kept].any():
        return f"not all of native's {int(kept.sum())} infinities are there"
    agreed = native.isfinite() & rounded.isfinite()
    if not agreed.any():
        return None
    # A sum of large terms is as inexact as they are large.
    atol, rtol = tolerance_of(case, native)
    scaled = Tolerance(atol * max(1.0, native[agreed].abs().amax().item()), rtol)
    agreed &= torch.isclose(native.double(), rounded.double(), atol=scaled.atol, rtol=rtol)
    return near_problem(found[agreed], native[agreed], scaled)


CHECK = Check(
    "extremes",
    "zeros, tiny and huge numbers, NaN and infinity give the results of native",
    each(extreme, _survives),
    not_native,
)

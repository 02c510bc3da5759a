"""Values: results equal those of native, in every dtype, size, option, layout and range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opweave.conformance import compare, draw, inputs
from opweave.conformance.checks.memory import memory_problem
from opweave.conformance.snapshot import Snapshot, copied, same_bits
from opweave.conformance.subject import (
    Case,
    Check,
    Finding,
    Outputs,
    Subject,
    claims,
    each,
    not_native,
    outputs_of,
)
from opweave.ir.op import tensors_in
from opweave.ir.rules import ROUNDS_LESS
from opweave.ir.tolerance import Tolerance

# Values: the result of native, for every accepted dtype, size, option and layout.

ProblemOf = Callable[[Case, Any], Finding]


def is_right(
    subject: Subject, case: Case, problem_of: ProblemOf = compare.outputs_problem, **how: Any
) -> Finding:
    """Compare the result with native and the float64 reference, and check its memory."""
    values = copied(case.values)
    before = Snapshot(values)
    result = subject.run(values, **how)
    problem = problem_of(case, result)
    return problem or memory_problem(case, values, before, outputs_of(result))


def _codes(subject: Subject) -> Iterator[Case]:
    """Yield cases of codes, and in the middle between two codes, if the op only quantizes.

    The largest code is in each row, so that a scale of the row is 1.
    """
    for base in inputs.chained(inputs.usual, inputs.options, inputs.without)(subject):
        dtype = torch.bool if base.refusal else base.native[0].dtype
        if dtype.itemsize > 1 or dtype is torch.bool:
            continue
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        codes = codes[codes.isfinite()].sort().values
        ones = {i: torch.ones_like(v) for i, v in enumerate(base.values) if isinstance(v, Tensor)}
        for label, numbers in (("codes", codes), ("ties", codes[1:] - codes.diff() / 2)):
            x = numbers[torch.randint(len(numbers), base.values[0].shape)]
            x[..., -1] = codes[-1]
            case = base.replaced(label, {**ones, 0: x.to(base.values[0])})
            if case.refusal or (label == "codes" and not torch.equal(case.native[0].double(), x)):
                break
            yield case


_GAPS = "slices, strides, transposed and repeated rows"
_sizes = inputs.chained(inputs.sizes, inputs.shapes, draw.large, _codes)
VALUES, OPTIONS, NONE, VALUES_LAYOUTS, DTYPES = (
    Check(name, f"outputs {promise}", each(cases, is_right), not_native)
    for name, promise, cases in (
        ("values", "match native within the op's tolerance, in every dtype and size", _sizes),
        ("options", "also match with other numbers, flags and strings", inputs.options),
        ("none", "also match if optional tensors are omitted", inputs.without),
        ("layouts", f"also match with {_GAPS}; gaps are not read", inputs.laid_out),
        ("dtypes", "also match if arguments have different dtypes", inputs.mixed),
    )
)
COMBINATIONS = Check(
    "combinations", "outputs match native with drawn pairs of sizes, dtypes, options and layouts",
    draw.drawn(is_right), not_native,
)  # fmt: skip
EMPTY = Check("empty", "a call with zero tokens works", each(inputs.empty, is_right))


# Precision: an argument of a wider dtype than the others keeps its precision.
#
# A float32 weight that a kernel rounds to the bfloat16 of its activations is not visible in the
# results: each stays within one rounding of the right one. So the argument itself is rounded,
# which must change the bits of the kernel's results where it changes many of native's.


_NARROW = (torch.bfloat16, torch.float16)
_MIN_CHANGED_ELEMENTS = 16  # with fewer, a correct kernel may round all of them alike


def _keeps_precision(subject: Subject, case: Case) -> Finding:
    narrow = next((t.dtype for t in tensors_in(case.values) if t.dtype in _NARROW), None)
    if narrow is None:
        return None
    for i, value in enumerate(case.values):
        if isinstance(value, Tensor) and value.dtype is torch.float32:
            rounded = value.to(narrow).to(torch.float32)
            name, other = case.op.schema.names[i], case.replaced("rounded", {i: rounded})
            if _is_ignored(subject, case, other):
                dtype = str(narrow).removeprefix("torch.")
                return f"rounds {name} to {dtype}: results are the same when it is rounded before"
    return None


def _is_ignored(subject: Subject, case: Case, other: Case) -> bool:
    """Whether *other* gives the kernel the results of *case*, and native many others."""
    if other.refusal is not None or _differing(case.native, other.native) < _MIN_CHANGED_ELEMENTS:
        return False
    one, two = (outputs_of(subject.run(copied(c.values))) for c in (case, other))
    return all(same_bits(a, b) for a, b in zip(one, two, strict=True))


def _differing(one: Outputs, other: Outputs) -> int:
    """Return how many elements are not equal."""
    pairs = zip(one, other, strict=True)
    return sum(int((a.double() != b.double()).sum()) for a, b in pairs if a.shape == b.shape)


PRECISION = Check(
    "precision", "arguments of a wider dtype are not rounded to the dtype of the activations",
    each(inputs.chained(inputs.usual, inputs.mixed), _keeps_precision), not_native,
)  # fmt: skip


# Rounding: implementations that round less often than the definition are more accurate.


_MAX_ERROR_RATIO = 1.05  # the error of few elements may be larger by chance


def _is_closer(subject: Subject, case: Case) -> Finding:
    outputs = outputs_of(subject.run(copied(case.values)))
    for i, parts in enumerate(zip(outputs, case.native, case.reference, strict=True)):
        found, native, reference = parts
        if found.dtype not in _NARROW:
            continue
        ours, theirs = _error(found, reference), _error(native, reference)
        if ours > _MAX_ERROR_RATIO * theirs:
            return (
                f"output {i} is not rounded less often than native's: its root-mean-square error "
                f"is {ours:.2e}, native's is {theirs:.2e}"
            )
    return None


def _error(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference.double()).square().mean().sqrt())


ROUNDING = Check(
    "rounding", "with the trait rounds_less: outputs are at least as accurate as those of native",
    each(inputs.chained(inputs.usual, inputs.few_and_many), _is_closer), claims(ROUNDS_LESS),
)  # fmt: skip


# Extreme numbers: zeros, other distributions, the smallest and largest, NaN and infinity.


def _with_element(number: float, place: float = 1 / 3) -> Callable[[Tensor], Tensor]:
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


def _large(dtype: torch.dtype, codes: int = 1) -> float:
    """Return a number whose square overflows in 16 bits, and of whose squares float32 adds many.

    Also if each is multiplied by up to *codes*.
    """
    return max(math.sqrt(torch.finfo(dtype).max) / 16 / codes, 1000.0)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "all zeros": torch.zeros_like,
    "all equal": torch.ones_like,
    "uniform": lambda t: torch.rand(t.shape, device=t.device).to(t.dtype) - 0.5,
    "positive": lambda t: t.abs() + 0.5,
    "mostly zeros": lambda t: torch.where(torch.rand(t.shape, device=t.device) < 0.9, 0.0, t),
    "a NaN": _with_element(float("nan")),
    "first a NaN": _with_element(float("nan"), 0),
    "last a NaN": _with_element(float("nan"), 1),
    "an infinity": _with_element(float("inf")),
    "last an infinity": _with_element(float("inf"), 1),
    "a negative infinity": _with_element(float("-inf")),
    "a row of NaN": _with_row(math.nan),
    "a row of infinity": _with_row(math.inf),
    "a row of negative infinity": _with_row(-math.inf),
    "tiny": _scaled_to(lambda dtype: torch.finfo(dtype).tiny / 4),
    "up to a hundred": _scaled_to(lambda dtype: 100.0),
    "large": _scaled_to(_large),
}
_CHANGES_OF_LARGE_TENSORS = ("up to a hundred", "large")
# A kernel may add products with the codes of a weight before it applies their scale. A mixture of
# experts does so for the gate and the up projection, and then for the product of both.
_CHANGES_NEXT_TO_CODES = {**CHANGES, "large": _scaled_to(partial(_large, codes=256))}
_CODES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_MANY_TOKENS = 257
_ROUNDING_REPEATS, _ROUNDING_UNITS = 4, 8

_INFINITE = (
    "an infinity",
    "last an infinity",
    "a negative infinity",
    "a row of infinity",
    "a row of negative infinity",
)

# The results of attention for NaN and infinity are not specified: a fused softmax treats a query
# without a finite score like one without keys, and adds a mask to the scores of masked keys.
_UNSPECIFIED_FOR_ATTENTION = ("a NaN", "first a NaN", "last a NaN", "a row of NaN", *_INFINITE)


def extreme(subject: Subject) -> Iterator[Case]:
    """Yield cases with extreme numbers in one argument at a time."""
    excluded = _UNSPECIFIED_FOR_ATTENTION if "attention" in subject.op.name else ()
    names = [name for name in CHANGES if name not in excluded]
    for base in inputs.usual(subject):
        yield from _changed(subject, base, names)
    for base in inputs.of_tokens(subject, _MANY_TOKENS):
        yield from inputs.while_fast(_changed(subject, base, _CHANGES_OF_LARGE_TENSORS))


def _changed(subject: Subject, base: Case, names: Sequence[str]) -> Iterator[Case]:
    codes = {i: v for i, v in enumerate(base.values) if getattr(v, "dtype", None) is torch.int8}
    yield base.replaced("the least codes", {i: torch.full_like(v, -128) for i, v in codes.items()})
    has_codes = any(t.dtype in _CODES for t in tensors_in(base.values))
    changes = _CHANGES_NEXT_TO_CODES if has_codes else CHANGES
    for i, value in enumerate(base.values):
        if not isinstance(value, Tensor) or not value.numel() or value.dtype not in inputs.DTYPES:
            continue
        for name in names:
            label = f"{subject.op.schema.names[i]}: {name}"
            yield base.replaced(label, {i: changes[name](value)})


def _extremes_problem(case: Case, result: Any) -> Finding:
    """Check that outputs are NaN where native is, and finite where native and the reference are."""
    problem = compare.structure_problem(case.native, result)
    if problem:
        return problem
    parts = zip(outputs_of(result), case.native, case.reference, strict=True)
    for i, (found, native, reference) in enumerate(parts):
        if not native.is_floating_point():
            problem = compare.near_problem(found, native, compare.tolerance_of(case, native))
            # Codes next to each other are near, but saturated ones do not depend on rounding.
            limits = (native == 127) | (native == -128)
            problem = problem or compare.codes_problem(found[limits], native[limits])
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
    tolerance = compare.tolerance_of(case, native)
    stable = torch.ones_like(native, dtype=torch.bool)
    for _ in range(_ROUNDING_REPEATS):
        shaken = case.with_values("shaken", [_shaken(v) for v in case.values]).native[place]
        stable &= torch.isclose(
            native.float(), shaken.float(), atol=tolerance.atol, rtol=tolerance.rtol, equal_nan=True
        )
    return compare.near_problem(found[stable], native[stable], tolerance) if stable.any() else None


def _shaken(value: Any) -> Any:
    """Return numbers with an error of some units in the last place."""
    if not isinstance(value, Tensor) or value.dtype not in inputs.DTYPES:
        return value
    factors = 1 + _ROUNDING_UNITS * torch.finfo(value.dtype).eps * (2 * torch.rand(value.shape) - 1)
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
    atol, rtol = compare.tolerance_of(case, native)
    scaled = Tolerance(atol * max(1.0, native[agreed].abs().amax().item()), rtol)
    agreed &= torch.isclose(native.double(), rounded.double(), atol=scaled.atol, rtol=rtol)
    return compare.near_problem(found[agreed], native[agreed], scaled)


EXTREMES = Check(
    "extremes", "zeros, tiny and huge numbers, NaN and infinity give the results of native",
    each(extreme, partial(is_right, problem_of=_extremes_problem)), not_native,
)  # fmt: skip


# Dimensions: zero, one or two token dimensions, if native supports them.


DIMENSIONS = Check(
    "dimensions",
    "activations without or with two token dimensions work, if native supports them",
    each(inputs.dimensions, is_right),
)

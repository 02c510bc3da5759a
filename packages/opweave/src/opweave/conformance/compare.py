"""Compare outputs with native and the reference, and describe a difference in one phrase.

A result may differ from the float64 reference by native's error plus the op's tolerance, or from
native by the tolerance. In addition, its root-mean-square error must not be much larger than
native's, which detects lost precision that is within the tolerance of each element; unless the
provider has a tolerance of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opweave.conformance.snapshot import same_bits
from opweave.conformance.subject import Case, Finding, Outputs, outputs_of
from opweave.ir.errors import MissingToleranceError
from opweave.ir.op import tensors_in
from opweave.ir.tolerance import Tolerance

_WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_EXACT = Tolerance(0.0, 0.0)
# An output's RMS error may be this multiple of native's. Native's own is one or two roundings;
# another order of a sum, or a rounding that native does not have, stays below.
_MAX_RMS_RATIO = 4.0
_MIN_RMS_ELEMENTS = 16
# Codes of 8 bits that may be the next one, as a share and as a number: a value near the middle
# between two codes may be computed in another order.
_MAX_CODES_SHARE, _MIN_CODES_ALLOWED = 0.2, 4


def outputs_problem(case: Case, result: Any) -> Finding:
    """Return what is wrong with the values, shapes or dtypes of *result*, or None."""
    problem = structure_problem(case.native, result)
    if problem:
        return problem
    parts = zip(outputs_of(result), case.native, case.reference, strict=True)
    for i, (found, native, reference) in enumerate(parts):
        if found.dtype in _WIDE and reference.is_floating_point():
            problem = _referenced(case, found, native, reference)
        else:
            problem = near_problem(found, native, tolerance_of(case, found))
            problem = problem or codes_problem(found, native)
        if problem:
            return f"output {i}: {problem}"
    return None


def structure_problem(expected: Outputs, result: Any) -> Finding:
    """Return what is wrong with the number, kind, shapes, dtypes or devices of the outputs."""
    if len(expected) > 1 and not isinstance(result, tuple):
        return f"returned {type(result).__name__}, not a tuple of {len(expected)} tensors"
    found = outputs_of(result)
    if len(found) != len(expected) or not all(isinstance(t, Tensor) for t in found):
        kinds = ", ".join(type(t).__name__ for t in found)
        return f"returned ({kinds}), not {len(expected)} tensor(s)"
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        for what in ("shape", "dtype", "device"):
            one, other = getattr(a, what), getattr(b, what)
            if one != other:
                one, other = (tuple(v) if what == "shape" else v for v in (one, other))
                return f"output {i} has {what} {one}, native's has {other}"
    return None


def bits_problem(expected: Sequence[Tensor], found: Sequence[Tensor]) -> Finding:
    """Return where bits differ, or None."""
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if not same_bits(a, b):
            return f"output {i} differs: {_worst(b, a, a.ne(b) | (a.isnan() != b.isnan()))}"
    return None


def near_problem(found: Tensor, expected: Tensor, tolerance: Tolerance) -> Finding:
    """Return where *found* is not within *tolerance* of *expected*, or None."""
    a, b = (_plain(t) for t in (found, expected))
    bad = ~torch.isclose(a, b, atol=tolerance.atol, rtol=tolerance.rtol, equal_nan=True)
    allowed = tolerance.atol + tolerance.rtol * b.abs()
    return _worst(found, expected, bad, allowed) if bad.any() else None


def codes_problem(found: Tensor, native: Tensor) -> Finding:
    """Return the number of different 8-bit codes, if there are more than rounding explains."""
    if found.element_size() > 1 or found.dtype is torch.bool:
        return None
    a, b = _plain(found), _plain(native)
    other = (a != b) & ~(a.isnan() & b.isnan())
    if other.sum() <= max(_MIN_CODES_ALLOWED, _MAX_CODES_SHARE * found.numel()):
        return None
    counts = f"{int(other.sum())} of {found.numel()} codes differ by one"
    accepted = f"the native implementation's, and {_MAX_CODES_SHARE:.0%} of them may"
    return f"{counts} from {accepted}: {_worst(found, native, other)}"


def _referenced(case: Case, found: Tensor, native: Tensor, reference: Tensor) -> Finding:
    atol, rtol = tolerance_of(case, found)
    f, n, r = (t.to(torch.float64) for t in (found, native, reference))
    error, usual = (f - r).abs(), (n - r).abs()
    # Where native alone is not finite, it says nothing: torch's own kernels overflow, or read NaN
    # past the end of a row.
    usual = torch.where(r.isfinite() & ~n.isfinite(), 0.0, usual)
    allowed = atol + rtol * r.abs() + usual
    close = error <= allowed
    close |= torch.isclose(f, n, atol=atol, rtol=rtol, equal_nan=True)
    if not close.all():
        return _worst(found, native, ~close, allowed)
    finite = error.isfinite() & usual.isfinite()
    if case.op.has_own_tolerance(_coarsest(case, found), case.provider):
        return None  # it rounds more than native, as declared
    return _mean_problem(found.dtype, error[finite], usual[finite], r[finite])


def _are_few(t: Tensor) -> bool:
    """Whether there are few different numbers; most often, the first ones show that it is not."""
    parts = (t.flatten()[:n].sort().values.diff() for n in (1000, t.numel()))
    return all(1 + int(part.count_nonzero()) < _MIN_RMS_ELEMENTS for part in parts)


def _mean_problem(dtype: torch.dtype, error: Tensor, usual: Tensor, reference: Tensor) -> Finding:
    # To float64, native is the reference itself; of few numbers its error may be zero by luck.
    if dtype is torch.float64 or _are_few(reference):
        return None
    # Scaled first: the squares of large numbers are larger than any.
    scale = reference.abs().amax().clamp(min=torch.finfo(dtype).tiny)
    ours, theirs, size = (
        float((t / scale).square().mean().sqrt()) for t in (error, usual, reference)
    )
    allowed = _MAX_RMS_RATIO * theirs + torch.finfo(dtype).eps * size
    if not ours > allowed:
        return None
    return (
        f"less exact than native: its root-mean-square error is {ours / (size or 1):.2e} of the "
        f"result, native's is {theirs / (size or 1):.2e}"
    )


def tolerance_of(case: Case, output: Tensor) -> Tolerance:
    """Return the tolerance for *output*, which rounded inputs may widen."""
    try:
        return case.op.get_tolerance(_coarsest(case, output), case.provider)
    except MissingToleranceError:
        return _EXACT


def _coarsest(case: Case, output: Tensor) -> torch.dtype:
    """Return the dtype of *output* or of an input, whichever rounds most."""
    if output.dtype not in _WIDE:
        return output.dtype
    floats = [t.dtype for t in tensors_in(case.values) if t.dtype in _WIDE]
    return max([output.dtype, *floats], key=lambda d: torch.finfo(d).eps)


def _plain(t: Tensor) -> Tensor:
    """Return *t* in a dtype that can be compared."""
    if t.dtype in _WIDE:
        return t.to(torch.float64)
    return t.to(torch.float32) if t.is_floating_point() else t.to(torch.int64)


def _worst(found: Tensor, expected: Tensor, bad: Tensor, allowed: Tensor | None = None) -> str:
    """Describe the first element that is *bad*; *allowed* are the differences that are not."""
    places = bad.nonzero()
    place = tuple(places[0].tolist())
    a, b = (_plain(t)[place].item() for t in (found, expected))
    digits = next((n for n in (6, 9) if f"{a:.{n}g}" != f"{b:.{n}g}"), 17)
    difference = f"difference {abs(a - b):.3g}, "
    tolerance = "" if allowed is None else f"tolerance {allowed[place].item():.3g}, "
    return (
        f"{a:.{digits}g} at {list(place)}, native has {b:.{digits}g} "
        f"({difference}{tolerance}{len(places)} of {bad.numel()} elements)"
    )

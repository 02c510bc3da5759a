"""Declarations: predicates, keywords and gradients hold what the op promises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from opweave.conformance import inputs
from opweave.conformance.compare import near_problem, outputs_problem
from opweave.conformance.snapshot import copied, fake_values
from opweave.conformance.subject import (
    FAILURES,
    Case,
    Check,
    Finding,
    Findings,
    Subject,
    each,
    natively,
    raised,
)
from opweave.ir.calls import gradients
from opweave.ir.rules import DIFFERENTIABLE
from opweave.ir.tolerance import Tolerance

# Predicates: they are correct, and depend only on shapes and dtypes.


_MAX_MILLISECONDS = 1.0
_TOKEN_COUNTS = (2, 3, 5, 8, 33, 257)  # with 0 or 1, fewer strides matter
_MANY_TOKENS = 4099
_OUT_OF_RANGE, _LARGE_INDEX = "out of range", 1 << 30
_BOUNDS = re.compile("^cu_|_loc$|_lens$")  # of sequences, which native need not check


_predicate_cases = inputs.chained(
    inputs.empty, inputs.options, inputs.without, inputs.mixed, inputs.laid_out
)


def misfits(subject: Subject) -> Iterator[Case]:
    """Yield cases in which one tensor is too short, or has a dimension or a large number more."""
    names = subject.op.schema.names
    for base in inputs.usual(subject):
        for i, value in enumerate(base.values):
            if isinstance(value, Tensor) and value.ndim:
                changes = {
                    "shorter rows": value[..., :-1],
                    "a row less": value[:-1],
                    "another dimension": value[None],
                }
                if value.dtype in (torch.int32, torch.int64) and not _BOUNDS.search(names[i]):
                    changes[_OUT_OF_RANGE] = torch.full_like(value, _LARGE_INDEX)
                for change, other in changes.items():
                    yield base.replaced(f"{names[i]}: {change}", {i: other})


def _honest(subject: Subject) -> Findings:
    for case in _predicate_cases(subject):
        yield _said(_answer_problem(subject, case), case)
        yield _said(_runs(subject, case), case)
    yield from _sizes(subject)
    for case in (*inputs.usual(subject, 1), *inputs.of_tokens(subject, _MANY_TOKENS, 1)):
        yield _said(_cost_problem(subject, case), case)


def _cost_problem(subject: Subject, case: Case) -> Finding:
    """Selection asks the predicate before each call that is not compiled."""
    milliseconds = 1e3 * float(subject.ask("rejection_seconds", case.values))
    expected = f"should take at most {_MAX_MILLISECONDS:g} ms, since it runs before each eager call"
    slow = milliseconds > _MAX_MILLISECONDS
    return f"the predicate took {milliseconds:.1f} ms, and {expected}" if slow else None


def _said(problem: Finding, case: Case) -> Finding:
    return f"{problem}: {case}" if problem else None


def _answer_problem(subject: Subject, case: Case) -> Finding:
    """The predicate answers, always the same, and the same of tensors without numbers."""
    try:
        answer = subject.ask("rejection", case.values)
        again = subject.ask("rejection", copied(case.values))
    except FAILURES as error:
        return f"the predicate {raised(error)}; it should return whether it accepts the arguments"
    if (answer is None) != (again is None):
        both = f"{_verb(answer)} the arguments, and {_verb(again)} equal ones in a second call"
        return f"the predicate {both}; it should always give the same answer"
    try:
        of_fakes = subject.ask("rejection", case.values, fake=True)
    except FAILURES as error:
        expected = "it should need only shapes, dtypes and strides"
        return f"the predicate {raised(error)} for fake tensors, which have no numbers; {expected}"
    if answer is not None and of_fakes is None:
        expected = "fake tensors like them; it should not depend on numbers"
        return f"the predicate {_verb(answer)} the arguments, and accepted {expected}"
    return None


def _verb(answer: str | None) -> str:
    return "accepted" if answer is None else f"rejected ({answer})"


def _runs(subject: Subject, case: Case) -> Finding:
    """Accepted arguments run."""
    try:
        if case.refusal or not subject.accepts(case.values):
            return None
    except FAILURES:
        return None  # _answer_problem() reports it
    try:
        subject.run(copied(case.values))
    except FAILURES as error:
        return f"the predicate accepted arguments for which the implementation {raised(error)}"
    return None


def _sizes(subject: Subject) -> Findings:
    """The answer does not depend on the number of tokens."""
    answers = {}
    for count in _TOKEN_COUNTS:
        case = inputs.generated(subject, num_tokens=count)
        if case is not None and case.refusal is None:
            answers[count] = subject.accepts(case.values)
    if len(set(answers.values())) > 1:
        listed = ", ".join(f"{n}: {'yes' if yes else 'no'}" for n, yes in answers.items())
        yield (
            f"the predicate accepted some numbers of tokens only ({listed}), and should accept all "
            "or none; leave that to priorities, and to the option compile_ranges of compiled code"
        )
    elif answers:
        yield None


def _refuses(subject: Subject) -> Findings:
    for case in inputs.chained(misfits, inputs.options)(subject):
        # A ValueError is native's own; other errors are those of what it happens to call.
        own = IndexError if case.label.endswith(_OUT_OF_RANGE) else ValueError
        if isinstance(case.refusal, own) and _may_run(subject, case):
            yield _said(_refusal_problem(subject, case), case)


def _may_run(subject: Subject, case: Case) -> bool:
    """Whether the implementation may run on arguments that native refuses.

    On a GPU, an index out of range makes CUDA unusable for the process. So only arguments that
    native refuses without reading their values are tried there.
    """
    if subject.device == "cpu":
        return True
    _, fakes = fake_values(case.values)
    args, kwargs = case.op.schema.split(fakes)
    try:
        case.op.native(*args, **kwargs)
    except Exception:
        return True
    return False


def _refusal_problem(subject: Subject, case: Case) -> Finding:
    try:
        if not subject.accepts(case.values):
            return None
        subject.run(copied(case.values))
    except Exception:
        return None
    accepted = "the predicate accepted arguments that should be rejected, and the kernel computed"
    return f"{accepted} a result: the native implementation {raised(case.refusal)}"


PREDICATE = Check(
    "predicate",
    "the predicate needs only shapes and dtypes, and the arguments that it accepts work",
    _honest, lambda subject: bool(subject.facts["has_predicate"]),
)  # fmt: skip
MISFITS = Check(
    "misfits", "arguments that native rejects are rejected by the predicate or the implementation",
    _refuses,
)  # fmt: skip


# Keywords: the implementation accepts arguments by name, and has the op's defaults.


def _keyword_cases(subject: Subject) -> Iterator[Case]:
    yield from inputs.usual(subject)
    defaults = {i: p.default for i, p in enumerate(subject.op.schema.params) if p.has_default}
    for base in inputs.usual(subject):
        yield base.replaced("defaults", defaults)


def _by_name(subject: Subject, case: Case) -> Finding:
    for callee in ("the op", "the implementation"):
        for spelling, (args, kwargs) in _calls(case).items():
            values = copied(args), _copied(kwargs)
            result = subject.ask("named", *values, directly=callee == "the implementation")
            problem = outputs_problem(case, result)
            if problem:
                return f"{callee}, {spelling}: {problem}"
    return None


def _calls(case: Case) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the ways to write one call."""
    params = case.op.schema.params
    named = dict(zip(case.op.schema.names, case.values, strict=True))
    needed = {
        p.name: named[p.name] for p in params if not p.has_default or named[p.name] != p.default
    }
    first = next(iter(named))
    rest = {name: value for name, value in named.items() if name != first}
    return {
        "all by name": ((), named),
        "the first by position": ((named[first],), rest),
        "backwards": ((), dict(reversed(named.items()))),
        "defaults left out": ((), needed),
    }


def _copied(kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(kwargs, copied(tuple(kwargs.values())), strict=True))


KEYWORDS = Check(
    "keywords", "positional, keyword and default arguments give the same result",
    each(_keyword_cases, _by_name),
)  # fmt: skip


# Gradients: autograd through the implementation gives the op's gradient.


# Sums over all rows, in another order.
_TOLERANCE = Tolerance(1e-4, 1e-3)


def _gradient_cases(subject: Subject) -> list[Case]:
    generators = inputs.usual, inputs.without, inputs.options, inputs.dimensions
    cases = inputs.chained(*generators)(subject)
    return [case for case in cases if any(map(_is_differentiated, case.values))]


def _same(subject: Subject, case: Case) -> Finding:
    leaves = [i for i, value in enumerate(case.values) if _is_differentiated(value)]
    with natively(subject.op):
        expected = gradients(subject.op.native, subject.op, copied(case.values), leaves)
    found = subject.ask("gradients", copied(case.values), leaves)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if (a is None) != (b is None):
            return f"gradient {i} is {'missing' if a is None else 'not that of native: None'}"
        if a is None or b is None or near_problem(a, b, _TOLERANCE) is None:
            continue
        # A result in 16 bits passes its rounding on to the gradients, which may double.
        atol, rtol = _TOLERANCE
        problem = near_problem(a, b, Tolerance(atol + 2 * _error(case, leaves, i, b), rtol))
        if problem:
            return f"gradient {i}: {problem}"
    return None


def _error(case: Case, leaves: list[int], place: int, gradient: Tensor) -> float:
    """Return the largest error of one of native's gradients, or 0 if float64 fails."""
    try:
        with natively(case.op):
            exact = gradients(case.op.native, case.op, copied(case.wide_values), leaves)[place]
    except Exception:
        return 0.0
    return 0.0 if exact is None else (gradient.double() - exact).abs().amax().item()


def _is_differentiated(value: Any) -> bool:
    """Whether *value* is a tensor with a gradient, in a dtype that is exact enough to compare."""
    return isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)


GRADIENTS = Check(
    "gradients",
    "with the trait differentiable: autograd gives the gradient of native",
    each(_gradient_cases, _same),
    lambda subject: subject.has(DIFFERENTIABLE) and not subject.is_native,
)

"""Predicates: they are correct, and depend only on shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor

from opweave.conformance import dtypes, inputs, layouts, scalars
from opweave.conformance.case import Case
from opweave.conformance.check import FAILURES, Check, Finding, Findings, raised
from opweave.conformance.compat import fake_values
from opweave.conformance.memory import copied
from opweave.conformance.subject import Subject

_COUNTS = (2, 3, 5, 8, 33, 257)  # 0 and 1 have fewer strides


def _has_one(subject: Subject) -> bool:
    return not subject.impl.supports_all_args


def _cases(subject: Subject) -> Iterator[Case]:
    yield from chain(
        inputs.empty(subject),
        scalars.options(subject),
        scalars.without(subject),
        dtypes.mixed(subject),
        layouts.laid_out(subject),
    )


def misfits(subject: Subject) -> Iterator[Case]:
    """Yield cases in which one tensor is too short, or has a dimension more."""
    for base in inputs.usual(subject):
        for i, value in enumerate(base.values):
            if isinstance(value, Tensor) and value.ndim:
                for what, other in {
                    "shorter rows": value[..., :-1],
                    "a row less": value[:-1],
                    "another dimension": value[None],
                }.items():
                    values = [other if i == j else v for j, v in enumerate(base.values)]
                    yield base.with_values(f"{subject.op.schema.names[i]}: {what}", values)


def _honest(subject: Subject) -> Findings:
    for case in _cases(subject):
        yield _said(_answer_problem(subject, case), case)
        yield _said(_runs(subject, case), case)
    yield from _sizes(subject)


def _said(problem: Finding, case: Case) -> Finding:
    return f"{problem}: {case}" if problem else None


def _answer_problem(subject: Subject, case: Case) -> Finding:
    """The predicate answers, always the same, and the same of tensors without numbers."""
    try:
        answer = subject.impl.rejection(case.values)
        again = subject.impl.rejection(copied(case.values))
    except FAILURES as error:
        return raised(error)
    if (answer is None) != (again is None):
        return "asked twice, the predicate answers differently"
    try:
        of_fakes = subject.impl.rejection(fake_values(case.values))
    except FAILURES as error:
        return f"of fake tensors, which have no numbers, the predicate {raised(error)}"
    if answer is not None and of_fakes is None:
        return "the predicate accepts fake tensors, and not the same with numbers"
    return None


def _runs(subject: Subject, case: Case) -> Finding:
    """Accepted arguments run."""
    try:
        if case.refusal or not subject.accepts(case.values):
            return None
    except FAILURES:
        return None  # said already
    try:
        subject.run(copied(case.values))
    except FAILURES as error:
        return f"accepts what it fails on: it {raised(error)}"
    return None


def _sizes(subject: Subject) -> Findings:
    """The answer does not depend on the number of tokens."""
    answers = {}
    for count in _COUNTS:
        case = inputs.generated(subject, num_tokens=count)
        if case is not None and case.refusal is None:
            answers[count] = subject.accepts(case.values)
    if len(set(answers.values())) > 1:
        told = ", ".join(f"{n}: {'yes' if yes else 'no'}" for n, yes in answers.items())
        yield (
            f"the predicate depends on the number of tokens ({told}); leave that to priorities, "
            "and to the option compile_ranges of compiled code"
        )
    elif answers:
        yield None


def _refuses(subject: Subject) -> Findings:
    for case in chain(misfits(subject), scalars.options(subject)):
        # A ValueError is native's own; other errors are those of what it happens to call.
        if isinstance(case.refusal, ValueError) and _may_run(subject, case):
            yield _said(_refusal_problem(subject, case), case)


def _may_run(subject: Subject, case: Case) -> bool:
    """Whether a kernel that takes what native refuses does no more than compute nonsense.

    On a GPU, an index out of range ends CUDA for the process: there, what native refuses without
    looking at numbers has to do.
    """
    if subject.device == "cpu":
        return True
    fakes = fake_values(case.values)
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
    return f"computes what native refuses: native {raised(case.refusal)}"


PREDICATE = Check(
    "predicate",
    "the predicate needs only shapes and dtypes, and the arguments that it accepts work",
    _honest,
    _has_one,
)
MISFITS = Check(
    "misfits",
    "arguments that native rejects are rejected by the predicate or the implementation",
    _refuses,
)

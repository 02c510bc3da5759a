"""Repetition: a call has the same result after thousands of other calls, and some time later.

It runs last, so that all other checks run between the first call and this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, islice

from opweave.conformance import inputs
from opweave.conformance.case import Case, outputs_of
from opweave.conformance.check import Check, Finding, each, not_native
from opweave.conformance.checks.values import is_right
from opweave.conformance.compare import bits_problem
from opweave.conformance.memory import copied
from opweave.conformance.subject import Subject

_SECONDS = 0.5  # for each case
_FEWEST = 3  # calls
_CASES = 2


def _cases(subject: Subject) -> Iterator[Case]:
    found = chain(inputs.usual(subject), inputs.few_and_many(subject))
    usable = (c for c in found if c.refusal is None and subject.accepts(c.values))
    return islice(usable, _CASES)


def _stays(subject: Subject, case: Case) -> Finding:
    problem = is_right(subject, case)
    if problem:
        return problem
    first = outputs_of(subject.run(copied(case.values)))
    start, calls = time.perf_counter(), 1
    while calls < _FEWEST or time.perf_counter() - start < _SECONDS:
        calls += 1
        problem = bits_problem(first, outputs_of(subject.run(copied(case.values))))
        if problem:
            problem = problem.replace("native has", "the first had")
            passed = time.perf_counter() - start
            return f"call {calls}, {passed:.2f} s after the first, differs: {problem}"
    return None


CHECK = Check(
    "repetition",
    "a call gives the same bits after thousands of other calls, and some time later",
    each(_cases, _stays),
    not_native,
)

"""Checks and their outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from opweave.conformance.case import Case
from opweave.conformance.place import arrived
from opweave.conformance.subject import Subject

Finding = str | None  # what is wrong with a case, or None
Findings = Iterator[Finding]
Examine = Callable[[Subject, Case], Finding]

FAILURES = (Exception, SystemExit)
"""Exceptions of the code under verification, which must not end the program."""

_MAX_PROBLEMS = 3  # of one check; more of them say no more


def always(subject: Subject) -> bool:
    """Return True: the check applies to all implementations."""
    return True


def not_native(subject: Subject) -> bool:
    """Whether the implementation is not native, so that it can be compared with native."""
    return not subject.is_native


@dataclass(frozen=True)
class Check:
    """A conformance check.

    Attributes:
        name: the name in tables and options.
        promise: the property that a passing implementation has, in one line.
        run: yields the problem of each case, or None.
        applies: returns whether the check applies to an implementation.
    """

    name: str
    promise: str
    run: Callable[[Subject], Findings]
    applies: Callable[[Subject], bool] = always


@dataclass
class Outcome:
    """The outcome of a check.

    Attributes:
        check: its name.
        passed: the number of cases that passed.
        problems: the first few problems of other cases.
        seconds: the duration.
    """

    check: str
    passed: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """``passed``, ``failed``, or ``none`` if there was no case."""
        if self.problems:
            return "failed"
        return "passed" if self.passed else "none"


def each(cases: Callable[[Subject], Iterable[Case]], examine: Examine) -> Callable[..., Findings]:
    """Return a check that runs *examine* on every case that native and the predicate accept."""

    def run(subject: Subject) -> Findings:
        for case in cases(subject):
            yield from accepted(subject, case, examine)

    return run


def accepted(subject: Subject, case: Case, examine: Examine) -> Findings:
    """Yield the problems of *case*, if native and the predicate accept it."""
    if case.refusal is not None:
        return
    try:
        if not subject.accepts(case.values):
            return
        arrived(case)
        problem = examine(subject, case)
    except FAILURES as error:
        problem = raised(error)
    yield f"{problem}: {case}" if problem else None


def raised(error: BaseException | None) -> str:
    """Return an exception as a phrase."""
    lines = str(error).strip().splitlines()
    return f"raised {type(error).__name__}{f' ({lines[0]})' if lines else ''}"


def outcome_of(
    name: str, run: Callable[[], Findings], most_problems: int = _MAX_PROBLEMS
) -> Outcome:
    """Run the check called *name*, until *most_problems* are found."""
    arrived(name)
    outcome, start = Outcome(name), time.perf_counter()
    try:
        for finding in run():
            if finding is None:
                outcome.passed += 1
            else:
                outcome.problems.append(finding)
            if len(outcome.problems) == most_problems:
                break
    except FAILURES as error:
        outcome.problems.append(raised(error))
    outcome.seconds = time.perf_counter() - start
    return outcome

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
    """Whether a check is about *subject*: it is about all."""
    return True


def not_native(subject: Subject) -> bool:
    """Whether there is a definition to compare with, other than itself."""
    return not subject.is_native


@dataclass(frozen=True)
class Check:
    """A conformance check.

    Attributes:
        name: as in tables and options.
        promise: what holds where it passes, in one line.
        run: yields what is wrong with each case, or None.
        applies: whether it is about an implementation at all.
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
        passed: how many cases were right.
        problems: what was wrong with others; not more than the first few.
        seconds: how long it took.
    """

    check: str
    passed: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """``passed``, ``failed``, or ``none`` where there was nothing to check."""
        if self.problems:
            return "failed"
        return "passed" if self.passed else "none"


def each(cases: Callable[[Subject], Iterable[Case]], examine: Examine) -> Callable[..., Findings]:
    """Return what runs *examine* on every case that native and the predicate accept."""

    def run(subject: Subject) -> Findings:
        for case in cases(subject):
            yield from accepted(subject, case, examine)

    return run


def accepted(subject: Subject, case: Case, examine: Examine) -> Findings:
    """Yield what is wrong with *case*, if native and the predicate accept it."""
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

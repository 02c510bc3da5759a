"""Verifies implementations with every check."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from opweave.conformance.check import FAILURES, Check, Outcome, outcome_of, raised
from opweave.conformance.checks import COMPILING, select_checks
from opweave.conformance.errors import NonconformingError
from opweave.conformance.global_state import GlobalState
from opweave.conformance.group import group_for
from opweave.conformance.inputs import arguments, with_accepted_sizes
from opweave.conformance.subject import Subject


@dataclass(frozen=True)
class Result:
    """The result of verifying an implementation.

    Attributes:
        subject: the implementation.
        outcomes: the outcome of each applicable check.
        obstacle: why nothing could be verified, or an empty string.
    """

    subject: Subject
    outcomes: tuple[Outcome, ...]
    obstacle: str = ""

    @property
    def status(self) -> str:
        """``passed``, ``failed``, or ``unverified`` without any case."""
        if any(outcome.problems for outcome in self.outcomes):
            return "failed"
        return "passed" if self.passed else "unverified"

    @property
    def passed(self) -> int:
        """Number of passed cases."""
        return sum(outcome.passed for outcome in self.outcomes)

    @property
    def seconds(self) -> float:
        """Duration of all checks."""
        return sum(outcome.seconds for outcome in self.outcomes)

    def raise_if_failed(self) -> None:
        """Raise NonconformingError with every problem, if there is one."""
        if self.status == "failed":
            lines = [f"{o.check}: {problem}" for o in self.outcomes for problem in o.problems]
            raise NonconformingError("\n".join([f"{self.subject} fails:", *lines]))


def verify(
    subject: Subject,
    checks: Iterable[str] = (),
    *,
    seed: int = 0,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> Result:
    """Run every check, or those named, on an implementation.

    The inputs of a check depend only on the seed, the implementation and the check, so that a
    finding can be reproduced in isolation.

    Args:
        subject: the implementation.
        checks: names of the checks; empty: all.
        seed: of the inputs.
        report: called with the outcome of each check.

    Raises:
        UnknownCheckError: a check does not exist.
    """
    chosen = select_checks(checks)
    with group_for(subject):
        subject, obstacle = _prepared(subject)
        if obstacle:
            return Result(subject, (), obstacle)
        applicable = [check for check in chosen if check.applies(subject)]
        outcomes = []
        for check in applicable:
            outcomes.append(_outcome(check, subject, seed))
            report(outcomes[-1])
    if any(outcome.passed or outcome.problems for outcome in outcomes):
        return Result(subject, tuple(outcomes))
    return Result(
        subject, tuple(outcomes), f"no case for it in {', '.join(c.name for c in chosen)}"
    )


def _prepared(subject: Subject) -> tuple[Subject, str]:
    """Return *subject* with sizes that it accepts, and the obstacle if it cannot be verified."""
    impl = subject.impl
    if not impl.supported:
        return subject, impl.unsupported_reason
    if not subject.op.has_input_generator:
        return subject, "the op has no input generator"
    with _seeded(0):
        try:
            arguments(subject)
        except FAILURES as error:
            return subject, f"the op's input generator {raised(error)}"
        try:
            found = with_accepted_sizes(subject)
        except FAILURES:
            return subject, ""  # the predicate fails; its check says how
    if found is None:
        return subject, f"it accepts none of the op's usual arguments on {subject.device}"
    return found, ""


def _outcome(check: Check, subject: Subject, seed: int) -> Outcome:
    state = GlobalState()
    with _seeded(zlib.crc32(f"{seed} {subject} {check.name}".encode())), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = outcome_of(check.name, lambda: check.run(subject))
    # Otherwise the next check would start from the changed state, and not notice the change.
    changed = state.restore()
    if changed and check.name not in COMPILING:  # compilers set environment variables
        outcome.problems.append(f"left changed: {' and '.join(changed)}")
    return outcome


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch inside the block, and restore its generators afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield

"""Verifying: every check of an implementation, and what came of it."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from opweave.conformance.check import FAILURES, Check, Outcome, outcome_of
from opweave.conformance.checks import select_checks
from opweave.conformance.errors import NonconformingError
from opweave.conformance.group import group_for
from opweave.conformance.inputs import accepts_any
from opweave.conformance.subject import Subject


@dataclass(frozen=True)
class Result:
    """What came of verifying an implementation.

    Attributes:
        subject: the implementation.
        outcomes: what came of each check that is about it.
        obstacle: why nothing could be verified, if so.
    """

    subject: Subject
    outcomes: tuple[Outcome, ...]
    obstacle: str = ""

    @property
    def status(self) -> str:
        """``passed``, ``failed``, or ``unverified`` where no case was run."""
        if any(outcome.problems for outcome in self.outcomes):
            return "failed"
        return "passed" if self.passed else "unverified"

    @property
    def passed(self) -> int:
        """How many cases were right."""
        return sum(outcome.passed for outcome in self.outcomes)

    @property
    def seconds(self) -> float:
        """How long all checks took."""
        return sum(outcome.seconds for outcome in self.outcomes)

    def raise_if_failed(self) -> None:
        """Raise NonconformingError with every problem, if there is one."""
        if self.status == "failed":
            lines = [f"{o.check}: {problem}" for o in self.outcomes for problem in o.problems]
            raise NonconformingError("\n".join([f"{self.subject} fails:", *lines]))


def verify(subject: Subject, checks: Iterable[str] = (), *, seed: int = 0) -> Result:
    """Run every check, or those named, on an implementation.

    The inputs of a check follow from the seed, the implementation and the check alone, so that a
    finding can be had again by itself.

    Raises:
        UnknownCheckError: a check does not exist.
    """
    chosen = select_checks(checks)
    with group_for(subject):
        obstacle = _obstacle(subject)
        if obstacle:
            return Result(subject, (), obstacle)
        applicable = [check for check in chosen if check.applies(subject)]
        outcomes = tuple(_outcome(check, subject, seed) for check in applicable)
    if any(outcome.passed or outcome.problems for outcome in outcomes):
        return Result(subject, outcomes)
    return Result(subject, outcomes, f"no case for it in {', '.join(c.name for c in chosen)}")


def _obstacle(subject: Subject) -> str:
    impl = subject.impl
    if not impl.supported:
        return impl.unsupported_reason
    if not subject.op.has_input_generator:
        return "the op has no input generator"
    with _seeded(0):
        try:
            if accepts_any(subject):
                return ""
        except FAILURES:
            return ""  # the predicate fails; its check says how
    return f"it accepts none of the op's usual arguments on {subject.device}"


def _outcome(check: Check, subject: Subject, seed: int) -> Outcome:
    with _seeded(zlib.crc32(f"{seed} {subject} {check.name}".encode())), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome_of(check.name, lambda: check.run(subject))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch inside the block; outside of it nothing has happened."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield

"""Verify a platform with every check."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from opweave.conformance.platform.checks import CHECKS
from opweave.conformance.platform.subject import PlatformSubject
from opweave.conformance.subject import (
    NonconformingError,
    Outcome,
    UnknownCheckError,
)
from opweave.ir.errors import did_you_mean


@dataclass(frozen=True)
class PlatformResult:
    """The result of verifying a platform."""

    subject: PlatformSubject
    outcomes: tuple[Outcome, ...]

    @property
    def status(self) -> str:
        """``passed``, ``failed``, or ``none`` without anything to check."""
        if any(outcome.problems for outcome in self.outcomes):
            return "failed"
        return "passed" if any(outcome.passed for outcome in self.outcomes) else "none"

    def raise_if_failed(self) -> None:
        """Raise NonconformingError with every problem, if there is one."""
        if self.status == "failed":
            lines = [f"{o.check}: {problem}" for o in self.outcomes for problem in o.problems]
            raise NonconformingError("\n".join([f"{self.subject} fails:", *lines]))


def verify_platform(subject: PlatformSubject, checks: Iterable[str] = ()) -> PlatformResult:
    """Run every check, or those named, on a platform.

    Raises:
        UnknownCheckError: a check does not exist.
    """
    names = list(checks)
    for name in names:
        if name not in CHECKS:
            raise UnknownCheckError(f"unknown check {name!r}. {did_you_mean(name, CHECKS)}")
    chosen = [check for name, check in CHECKS.items() if not names or name in names]
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PlatformResult(subject, tuple(check.outcome(subject) for check in chosen))

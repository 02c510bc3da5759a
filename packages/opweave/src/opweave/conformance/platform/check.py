"""Checks of platforms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from opweave.conformance.check import Findings, Outcome, outcome_of
from opweave.conformance.platform.subject import PlatformSubject

_MAX_PROBLEMS = 5  # of one check; more of them say no more


@dataclass(frozen=True)
class PlatformCheck:
    """A check of platforms.

    Attributes:
        name: the name in tables and options.
        promise: the property that a passing platform has, in one line.
        run: yields the problem of each case, or None.
    """

    name: str
    promise: str
    run: Callable[[PlatformSubject], Findings]

    def outcome(self, subject: PlatformSubject) -> Outcome:
        """Run the check, until a few problems are found."""
        return outcome_of(self.name, lambda: self.run(subject), _MAX_PROBLEMS)

"""What a check of a platform is, and running one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from opweave.conformance.check import Findings, Outcome, raised
from opweave.conformance.platform.subject import PlatformSubject

_MAX_PROBLEMS = 5  # of one check; more of them say no more


@dataclass(frozen=True)
class PlatformCheck:
    """One thing that a platform must do.

    Attributes:
        name: as in tables and options.
        promise: what holds where it passes, in one line.
        run: yields what is wrong with each case, or None.
    """

    name: str
    promise: str
    run: Callable[[PlatformSubject], Findings]

    def outcome(self, subject: PlatformSubject) -> Outcome:
        """Run the check, until a few problems are found."""
        outcome, start = Outcome(self.name), time.perf_counter()
        try:
            for finding in self.run(subject):
                if finding is None:
                    outcome.passed += 1
                else:
                    outcome.problems.append(finding)
                if len(outcome.problems) == _MAX_PROBLEMS:
                    break
        except Exception as error:
            outcome.problems.append(raised(error))
        outcome.seconds = time.perf_counter() - start
        return outcome

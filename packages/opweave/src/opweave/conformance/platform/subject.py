"""The platform to verify, its checks, and questions to fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opweave.config.child_process import inherited_environment
from opweave.conformance.subject import Findings, Outcome, outcome_of
from opweave.platforms import Platform

# The subject of verification: a platform, and how a process finds it.


@dataclass(frozen=True)
class PlatformSubject:
    """A platform.

    Attributes:
        platform: the object, as opweave builds it.
        claim: the function that claims the device, ``"package.module:function"``; None if no
            installed plugin claims it, and the platform is given by its class.
        claimant: the name by which ``OPWEAVE_PLATFORM`` selects it.
        current: whether this process runs on it.
    """

    platform: Platform
    claim: str | None = None
    claimant: str | None = None
    current: bool = False

    def __str__(self) -> str:
        return f"platform {self.platform.name}"

    @property
    def qualname(self) -> str:
        """Module and name of its class."""
        cls = type(self.platform)
        return f"{cls.__module__}.{cls.__qualname__}"


# Checks of platforms.


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


# Questions to fresh processes, several at a time.


_TIMEOUT = 120.0


class ProcessFailedError(RuntimeError):
    """A fresh process did not answer; the message is the last line of what it wrote instead."""


def ask(code: str, *environments: Mapping[str, str]) -> list[Any]:
    """Run *code* in a fresh process for each of the environments, all at once; return the answers.

    Args:
        code: Python that prints one JSON document last.
        environments: variables that each process has in addition to this one's.

    Raises:
        ProcessFailedError: one of them did not print it.
    """
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**inherited_environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    return [_answer(*process.communicate(timeout=_TIMEOUT)) for process in running]


def _answer(stdout: str, stderr: str) -> Any:
    lines: Sequence[str] = stdout.splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        words = stderr.strip().splitlines() or ["it wrote nothing"]
        raise ProcessFailedError(words[-1]) from None

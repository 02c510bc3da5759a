"""Verifies in a subprocess, so that crashing or hanging kernels do not end this process.

Earlier results are kept, and the finding names the check and the arguments. The implementation's
remaining checks are skipped; the next implementation gets a new process.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from opweave.config.child_process import ChildWorker, ending
from opweave.conformance.snapshot import checking_environment
from opweave.conformance.subject import Outcome, Subject, VerifierFailedError
from opweave.conformance.verify import Result
from opweave.platforms import resolution
from opweave.platforms.resolution import VARIABLE


@dataclass(frozen=True)
class VerifyTask:
    """Settings shared by all implementations.

    Attributes:
        modules: modules to import, which register implementations.
        checks: names of the checks to run; empty: all.
        seed: seed of the inputs.
    """

    modules: tuple[str, ...]
    checks: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class Named:
    """The names that identify a :class:`Subject` in another process."""

    op: str
    provider: str
    device: str
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class CaseStart:
    """The next check or case."""

    what: str


@dataclass(frozen=True)
class Verified:
    """All checks have run with these generator options, or the obstacle that prevented them."""

    options: tuple[tuple[str, Any], ...]
    obstacle: str


class Verifier(ChildWorker):
    """Verifies implementations sequentially in a subprocess.

    Args:
        task: the shared settings.
        timeout: time limit of a case in seconds.
    """

    def __init__(self, task: VerifyTask, timeout: float) -> None:
        super().__init__("opweave.conformance.subprocess_main", task)
        self._timeout = timeout

    def environment(self) -> Mapping[str, str]:
        return {VARIABLE: resolution().to_json(), **checking_environment()}

    def start_error(self, code: int) -> Exception:
        return VerifierFailedError(f"the process that verifies {_ended(code)} before it began.")

    def verify(self, subject: Subject) -> Result:
        """Run the checks; a crash or a timeout is a problem of the last case.

        Raises:
            VerifierFailedError: the subprocess does not start.
        """
        process = self.running()
        process.connection.send(
            Named(subject.op.name, subject.provider, subject.device, subject.options)
        )
        outcomes, check, case = list[Outcome](), "", ""
        while True:
            try:
                message = process.receive(self._timeout)
            except EOFError:
                problem = _ended(self.end())
                break
            except TimeoutError:
                self.end()
                problem = f"did not come back within {self._timeout:g} s"
                break
            if isinstance(message, Outcome):
                outcomes.append(message)
                check, case = "", ""
            elif isinstance(message, CaseStart):
                check, case = (check, message.what) if check else (message.what, "")
            else:
                subject = replace(subject, options=message.options)
                return Result(subject, tuple(outcomes), message.obstacle)
        if case:
            problem += f": {case}"
        # Before the first check, the predicate has been asked.
        return Result(subject, (*outcomes, Outcome(check or "predicate", problems=[problem])))


def _ended(code: int) -> str:
    """Return how the subprocess ended by itself."""
    # glibc checks the heap: see checking_environment of snapshot.py.
    hint = ", as where memory behind a result is written" if code == -signal.SIGABRT else ""
    return f"ended the process with {ending(code)}{hint}"

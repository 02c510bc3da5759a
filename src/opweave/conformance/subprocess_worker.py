"""Verifies in a subprocess, so that crashing or hanging kernels do not end this process.

Earlier results are kept, and the finding names the check and the arguments. The implementation's
remaining checks are skipped; the next implementation gets a new process.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from opweave.config.child_process import ChildProcess, ending
from opweave.conformance.check import Outcome
from opweave.conformance.errors import VerifierFailedError
from opweave.conformance.heap import checking_environment
from opweave.conformance.subject import Subject
from opweave.conformance.verify import Result
from opweave.platforms import resolution
from opweave.platforms.handover import VARIABLE

_MODULE = "opweave.conformance.subprocess_main"
_STARTING = 300.0  # seconds to import opweave, its plugins and the user's modules


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


class Verifier:
    """Verifies implementations sequentially in a subprocess.

    Args:
        task: the shared settings.
        timeout: time limit of a case in seconds.
    """

    def __init__(self, task: VerifyTask, timeout: float) -> None:
        self._task, self._timeout = task, timeout
        self._process: ChildProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._end()

    def verify(self, subject: Subject) -> Result:
        """Run the checks; a crash or a timeout is a problem of the last case.

        Raises:
            VerifierFailedError: the subprocess does not start.
        """
        process = self._running()
        process.connection.send(
            Named(subject.op.name, subject.provider, subject.device, subject.options)
        )
        outcomes, check, case = list[Outcome](), "", ""
        while True:
            try:
                message = process.receive(self._timeout)
            except EOFError:
                problem = self._end()
                break
            except TimeoutError:
                self._end()
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

    def _running(self) -> ChildProcess:
        if self._process is not None and self._process.is_running:
            return self._process
        self._end()
        return self._start()

    def _start(self) -> ChildProcess:
        environment = {VARIABLE: resolution().to_json(), **checking_environment()}
        self._process = process = ChildProcess(_MODULE, environment=environment)
        process.connection.send(self._task)
        try:
            process.receive(_STARTING)
        except (EOFError, TimeoutError):
            raise VerifierFailedError(
                f"the process that verifies {self._end()} before it began."
            ) from None
        return process

    def _end(self) -> str:
        """End the subprocess, and return how it ended, if by itself."""
        process, self._process = self._process, None
        if process is None:
            return ""
        code = process.close()
        # glibc's checks of the heap are on: see the module heap.
        hint = ", as where memory behind a result is written" if code == -signal.SIGABRT else ""
        return f"ended the process with {ending(code)}{hint}"

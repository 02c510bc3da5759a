"""A subprocess that runs jobs, seen from the program that starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from gpu_queue.gate import Gate
from gpu_queue.job import ROOT, Job, Row
from gpu_queue.state import CRASHED, FAILED, PASSED, STOPPED, TIMEOUT

PATHS = (
    "packages/opweave/src",
    "packages/opweave-engine/src",
    "benchmarks",
    "tests/runs",
    "tests",
)
_MODULES = ("torch", "opweave.conformance")
_STARTING = 120.0  # seconds to import them
_LINES, _WIDTH = 15, 240  # of the output that is kept of a failure


@dataclass
class Outcome:
    """The outcome of a job."""

    status: str
    problem: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    facts: Mapping[str, str] = field(default_factory=dict)
    place: str = ""


class EndedError(Exception):
    """The process has ended, or did not answer; the argument is a status and the reason."""


class StartError(Exception):
    """A process for jobs does not start: no job can run."""


class WorkerProcess:
    """Runs jobs one after the other, in a process that is killed if one hangs.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        deadline: when everything stops, by ``time.monotonic``.
        gate: between the jobs that run at the same time.
        paths: folders to import from besides those of the repository.
        modules: that it imports before it says that it is ready.
    """

    def __init__(
        self,
        device: str,
        deadline: float,
        gate: Gate,
        *,
        paths: tuple[str, ...] = (),
        modules: tuple[str, ...] = _MODULES,
    ) -> None:
        self._deadline, self._gate = deadline, gate
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
        folders = [*(str(ROOT / path) for path in PATHS), *paths]
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        own, its = socket.socketpair()
        with own, its:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "gpu_queue.worker"),
                    *(str(its.fileno()), device, *modules),
                ],
                env=_environment(device, [*folders, *inherited]),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[its.fileno()],
                start_new_session=True,  # so that compilers' processes end with it
            )
            self._connection = Connection(own.detach())
        self._facts: Mapping[str, str] | None = None

    def run(self, job: Job) -> Outcome:
        """Run *job* to its end, or to the end of its time; unless it passes, end the process.

        Raises:
            StartError: the process did not start.
        """
        outcome = Outcome(PASSED)
        since, began = 0, time.monotonic()
        try:
            if self._facts is None:
                self._facts = self._receive(_STARTING, "start")["ready"]
            outcome.facts = self._facts
            since, began = os.fstat(self._output.fileno()).st_size, time.monotonic()
            problem = self._follow(job, outcome)
            if problem:
                outcome.status, outcome.problem = FAILED, problem
        except EndedError as ended:
            outcome.status, problem = ended.args
            outcome.problem = f"{problem}, at {outcome.place}" if outcome.place else problem
        outcome.seconds = time.monotonic() - began
        if outcome.status != PASSED:
            self.kill(since, outcome)
        if self._facts is None and outcome.status != STOPPED:
            raise StartError(outcome.problem)
        return outcome

    def _follow(self, job: Job, outcome: Outcome) -> str:
        """Send *job*, add what comes back to *outcome*, and return the job's problem, if any."""
        self._send(body=job.body, arguments=dict(job.arguments))
        left, is_alone = job.limit, False
        try:
            while True:
                began = time.monotonic()
                message = self._receive(left, "end")
                left -= time.monotonic() - began
                match message:
                    case {"row": dict(row)}:
                        outcome.rows.append(row)
                    case {"at": str(place)}:
                        outcome.place = place
                    case {"ask": "hold"}:
                        if not self._gate.hold(self._deadline - time.monotonic()):
                            raise EndedError(STOPPED, "the budget ended before it measured")
                        is_alone = True
                        self._send(go=True)
                    case {"ask": "release"}:
                        self._gate.release()
                        is_alone = False
                        self._send(go=True)
                    case {"end": str(problem)}:
                        return problem
                    case _:
                        raise EndedError(FAILED, f"sent {message!r}, which is not a row")
        finally:
            if is_alone:
                self._gate.release()

    def _send(self, **message: Any) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise EndedError(CRASHED, self._end()) from error

    def _receive(self, limit: float, what: str) -> dict[str, Any]:
        left = self._deadline - time.monotonic()
        try:
            if not self._connection.poll(max(min(limit, left), 0)):
                if left < limit:
                    raise EndedError(STOPPED, "the budget ended")
                raise EndedError(TIMEOUT, f"did not {what} within its time limit")
            message = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise EndedError(CRASHED, self._end()) from error
        except ValueError as error:
            raise EndedError(FAILED, "sent something that is not JSON") from error
        return message if isinstance(message, dict) else {"": message}

    def _end(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def kill(self, since: int = 0, outcome: Outcome | None = None) -> None:
        """End the process and those that it started; add the end of its output to *outcome*."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # the driver may keep it for a while
            self._process.wait(10)
        self._connection.close()
        if outcome is not None:
            self._output.seek(since)
            outcome.problem = "\n".join([outcome.problem, *_last_lines(self._output.read())])
        self._output.close()


def _environment(device: str, folders: list[str]) -> dict[str, str]:
    found = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",  # no model comes from the network
        "TORCHINDUCTOR_COMPILE_THREADS": "4",  # in each of several processes
        **os.environ,
        "OPWEAVE_PLATFORM": device,
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cuda":  # NVIDIA's or AMD's platform, whichever torch is for
        del found["OPWEAVE_PLATFORM"]
    return found


def _last_lines(output: bytes) -> list[str]:
    lines = output.decode(errors="replace").splitlines()
    printable = ("".join(c if c.isprintable() else "?" for c in line) for line in lines)
    return [line[:_WIDTH] for line in printable if line.strip()][-_LINES:]

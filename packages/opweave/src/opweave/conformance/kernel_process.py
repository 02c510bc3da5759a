"""Implementations in processes of their own, so that they can neither end this one nor change it.

This process makes the arguments and the expected results, and compares. The other one, of
:mod:`opweave.worker`, imports the module of the implementation and calls it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from opweave import worker
from opweave.config.child_process import ending, inherited_environment
from opweave.conformance.checks import QUICK
from opweave.conformance.compare import outputs_problem
from opweave.conformance.find import import_named, names_by_file
from opweave.conformance.subject import (
    Case,
    ConformanceError,
    KernelEndedError,
    Outcome,
    Subject,
    VerifierFailedError,
    raised,
)
from opweave.conformance.verify import Result, verify
from opweave.ir import current_registry
from opweave.ir.calls import copied
from opweave.platforms import current_platform, resolution
from opweave.platforms.resolution import VARIABLE

_REPEATS = 2  # of a call; the second one takes a faster path of the op
_START_SECONDS = 300.0  # to import torch and opweave, on a busy machine
_TORCH_CACHE = f"{tempfile.gettempdir()}/torchinductor_"


def _is_of_this_process(name: str, value: str) -> bool:
    """Whether pytest, or torch when it first compiled, has set the variable in this process."""
    by_torch = name == "TORCHINDUCTOR_CACHE_DIR" and value.startswith(_TORCH_CACHE)
    return by_torch or name.startswith("PYTEST_")


class Server:
    """The program that forks processes; it has none of the modules that compare results.

    Args:
        module: a slow module to import once, instead of in each process.
    """

    def __init__(self, module: str = "torch._dynamo") -> None:
        ours, theirs = socket.socketpair()
        environment = {**inherited_environment(), **worker.checking_environment()}
        environment[VARIABLE] = resolution().to_json()
        environment = {n: v for n, v in environment.items() if not _is_of_this_process(n, v)}
        with ours, theirs:
            self._program = subprocess.Popen(
                [sys.executable, "-P", "-m", "opweave.worker"],
                env=environment,
                stdin=theirs.fileno(),
                stdout=2,  # keep this process's standard output clean
                process_group=0,  # Ctrl-C must reach this process only
            )
            self._connection = Connection(ours.detach())
        self._connection.send(module)

    def fork(self, module: str, function: str) -> tuple[int, Connection]:
        """Call a function in a new process; return its id, and a connection to it.

        Raises:
            VerifierFailedError: the server does not start.
        """
        try:
            self._connection.send((module, function))
            if not self._connection.poll(_START_SECONDS):
                raise EOFError
            process: int = self._connection.recv()
            return process, Connection(recv_handle(self._connection))
        except (EOFError, OSError):
            raise VerifierFailedError("the process that runs kernels does not start.") from None

    def exit_code(self, process: int) -> int:
        """Return the exit code of a process that has ended, or ends now."""
        self._connection.send(process)
        code: int = self._connection.recv()
        return code

    def close(self) -> None:
        """End the server and its processes."""
        self._connection.close()
        self._program.wait()


class KernelProcess:
    """A process that calls one implementation; see :class:`opweave.ir.calls.Calls`.

    Args:
        server: the program that forks the process.
        named: the modules to import, the op, the provider and the device.
        timeout: time limit of a call in seconds.

    Attributes:
        ended: how the process has ended, or None.
        pid: its id.
    """

    def __init__(self, server: Server, named: tuple[Any, ...], timeout: float) -> None:
        self._server, self._timeout = server, timeout
        self._results = worker.shared_file()
        weakref.finalize(self, os.close, self._results)
        self.ended: str | None = None
        self._held: worker.CallRequest | None = None
        self.pid, self._connection = server.fork("opweave.worker", "serve")
        send_handle(self._connection, self._results, None)
        self._send(worker.CallRequest(*named))

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a method of :class:`opweave.ir.calls.Calls`.

        The tensors in *args* have the changes that the implementation made to them.

        Raises:
            Raised: the implementation raised.
            KernelEndedError: the process has ended, or did not return in time.
        """
        if self.ended is not None:
            raise KernelEndedError(self.ended)
        if method == "again" and self._held is not None:
            self._held.write()
        read_only = kwargs.pop("read_only", False)
        request = worker.CallRequest(method, args, kwargs, read_only=read_only)
        if method == "hold":
            self._held = request
        try:
            self._send(request)
            if not self._connection.poll(self._timeout):
                self._end(f"did not come back within {self._timeout:g} s")
            reply = self._connection.recv_bytes()
        except (EOFError, OSError):
            code = self._server.exit_code(self.pid)
            # glibc checks the heap: see checking_environment of opweave.worker.
            hints = {
                -signal.SIGABRT: ", as where memory behind a result is written",
                -signal.SIGSEGV: ", as where memory around an argument is used"
                + ", or a read-only argument is written" * read_only,
                -signal.SIGBUS: ", as where memory around an argument is used",
            }
            self.ended = f"ended the process with {ending(code)}{hints.get(code, '')}"
            raise KernelEndedError(self.ended) from None
        result = worker.decoded(reply, request, self._results)
        if method != "rejection":
            request.read()
        return result

    def _send(self, request: worker.CallRequest) -> None:
        self._connection.send_bytes(request.layout)
        send_handle(self._connection, request.file, None)
        self._connection.send_bytes(request.pickled)

    def _end(self, how: str) -> None:
        self.close()
        self.ended = how
        raise KernelEndedError(how)

    def close(self) -> None:
        """End the process."""
        if self.ended is None:
            self.ended = "was ended"
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._server.exit_code(self.pid)
        self._connection.close()


class Replayer(AbstractContextManager["Replayer"]):
    """Repeats calls in the processes in which ``opweave verify`` makes them.

    Args:
        modules: modules to import, which register implementations.
        timeout: time limit of a call in seconds.
    """

    def __init__(self, modules: Sequence[str], timeout: float = 120.0) -> None:
        self._modules, self._timeout = tuple(modules), timeout
        self._server: Server | None = None
        self._process: KernelProcess | None = None
        self._named: tuple[Any, ...] = ()  # what the process runs

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()
        if self._server is not None:
            self._server.close()

    def problem(self, case: Case, provider: str) -> str | None:
        """Return what is wrong with the result of an implementation, or None.

        An implementation that is registered by this program itself is not repeated.
        """
        module = names_by_file().get(case.op.impls[provider].site.file)
        if module is None or module == "__main__":
            return None
        modules = (*self._modules, *([] if module.startswith("opweave.") else [module]))
        process = self._running((modules, case.op.name, provider, current_platform.device_type))
        try:
            if provider not in process.call("providers"):
                return None
            process.call("mark")
            results = (process.call("run", copied(case.values)) for _ in range(_REPEATS))
            return next(filter(None, (outputs_problem(case, result) for result in results)), None)
        except KernelEndedError as error:
            return str(error)
        except Exception as error:
            return raised(error)

    def _running(self, named: tuple[Any, ...]) -> KernelProcess:
        """Return the process of an implementation; another one replaces one that has ended."""
        if self._process is None or self._process.ended is not None or named != self._named:
            if self._process is not None:
                self._process.close()
            self._server = self._server or Server()
            self._process = KernelProcess(self._server, named, self._timeout)
            self._named = named
        return self._process


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


class Verifier(AbstractContextManager["Verifier"]):
    """Verifies implementations sequentially, each in a process of its own.

    Args:
        task: the shared settings.
        timeout: time limit of a case in seconds.
    """

    def __init__(self, task: VerifyTask, timeout: float) -> None:
        self._task, self._timeout = task, timeout
        # Only other checks than the quick ones make fake tensors, or compile.
        is_quick = bool(task.checks) and set(task.checks) <= set(QUICK)
        self._server = Server("torch" if is_quick else "torch._dynamo")

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def subjects(
        self, ops: Sequence[str] = (), providers: Sequence[str] = (), platform: str | None = None
    ) -> list[Subject]:
        """Return the implementations, as :func:`opweave.conformance.subjects` does.

        The modules that register them are imported in another process, unless they also declare
        the ops.

        Raises:
            ConformanceError: no implementation is found, or a module fails.
        """
        process, connection = self._server.fork("opweave.conformance.find", "serve")
        arguments = (self._task.modules, tuple(ops), tuple(providers), platform)
        try:
            connection.send(arguments)
            rows = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            code = self._server.exit_code(process)
            raise VerifierFailedError(f"importing ended with {ending(code)}.") from None
        finally:
            connection.close()
        if isinstance(rows, str):
            raise ConformanceError(rows)
        return list(map(self._subject, rows))

    def _subject(self, row: dict[str, Any]) -> Subject:
        registry = current_registry()
        if row["op"] not in registry.ops:
            for module in row["modules"]:
                import_named("--import", module)
        op = registry.op(row["op"])
        return Subject(op, row["provider"], row["device"], origin=row)

    def verify(
        self, subject: Subject, report: Callable[[Outcome], None] = lambda outcome: None
    ) -> Result:
        """Run the checks; a crash or a timeout is a problem of the last case.

        Raises:
            VerifierFailedError: the process does not start.
        """
        modules = self._task.modules if subject.origin is None else subject.origin["modules"]
        named = (modules, subject.op.name, subject.provider, subject.device)
        process = KernelProcess(self._server, named, self._timeout)
        try:
            subject = replace(subject, process=process)
            return verify(subject, self._task.checks, seed=self._task.seed, report=report)
        finally:
            process.close()

"""Child processes that run a module or file of this package."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

# Child processes that run a module of this package and communicate through a socket.


_START_SECONDS = 300.0  # seconds to import opweave, its plugins and the user's modules


def inherited_environment() -> dict[str, str]:
    """Return an environment in which another interpreter finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class ChildProcess:
    """A new interpreter, not a fork, that communicates through a socket.

    Args:
        program: the module to run, or a file that is run without importing the package around it;
            its first argument is the socket's descriptor.
        arguments: further arguments.
        environment: variables to set in addition to those of this process.

    Attributes:
        connection: this process's end of the socket.
    """

    def __init__(
        self, program: str | Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        parent_end, child_end = socket.socketpair()
        code = [str(program)] if isinstance(program, Path) else ["-m", program]
        with parent_end, child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *code, str(child_end.fileno()), *arguments],
                env={**inherited_environment(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=2,  # keep this process's standard output clean
                pass_fds=[child_end.fileno()],
                process_group=0,  # Ctrl-C must reach this process only
            )
            self.connection = Connection(parent_end.detach())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def wait(self, timeout: float) -> int:
        """Wait for the process, and kill it after *timeout* seconds.

        Returns:
            The exit code, or the negative signal number if a signal ended the process.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self.kill()
        return self._process.wait()

    def kill(self) -> None:
        """Kill the process if it is running."""
        self._process.kill()

    def receive(self, timeout: float) -> Any:
        """Receive the next message.

        Raises:
            TimeoutError: none came in time.
            EOFError: the process has ended.
        """
        if not self.connection.poll(timeout):
            raise TimeoutError
        try:
            return self.connection.recv()
        except OSError as error:
            raise EOFError from error

    def close(self) -> int:
        """End the process, and return its exit code, or the negative signal number."""
        code = self.wait(1.0 if self.connection.poll(0) else 0.0)
        self.connection.close()
        return code


class ChildWorker(ABC):
    """A child process that does one job after another; a new one replaces one that has ended.

    The process receives the task first, and sends a message when it is ready for jobs.

    Args:
        program: the module or file to run, as for :class:`ChildProcess`.
        task: the settings shared by all jobs.
    """

    def __init__(self, program: str | Path, task: object) -> None:
        self._program, self._task = program, task
        self._process: ChildProcess | None = None

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Return the variables to set in addition to those of this process."""

    @abstractmethod
    def start_error(self, code: int) -> Exception:
        """Return the error for a process that ended with *code* before it was ready."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def running(self) -> ChildProcess:
        """Return a process that is ready for a job."""
        if self._process is not None and self._process.is_running:
            return self._process
        self.end()
        self._process = process = ChildProcess(self._program, environment=self.environment())
        try:
            process.connection.send(self._task)
            process.receive(_START_SECONDS)
        except (EOFError, OSError):  # TimeoutError is an OSError
            raise self.start_error(self.end()) from None
        return process

    def kill(self) -> None:
        """Kill the process, if there is one; another thread may wait for its answer."""
        if (process := self._process) is not None:
            process.kill()

    def end(self) -> int:
        """End the process, if there is one, and return its exit code as :meth:`close` does."""
        process, self._process = self._process, None
        return 0 if process is None else process.close()


def ending(code: int) -> str:
    """Return in words how a process ended.

    Examples:
        >>> ending(3), ending(-11)
        ('exit code 3', 'SIGSEGV')
    """
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def end_with_parent() -> None:
    """End this process once its parent has ended, even while a kernel runs."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

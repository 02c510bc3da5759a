"""Processes that run a module of this package, and are spoken to through a socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection


def inherited_environment() -> dict[str, str]:
    """Return the environment in which another Python finds the modules that this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class ChildProcess:
    """A fresh interpreter that does what comes through a socket; never a fork of this process.

    Args:
        module: its program; the first argument is the number of the socket.
        arguments: the others.
        environment: what it has set beside what this process has.

    Attributes:
        connection: to it.
    """

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        own, its = socket.socketpair()
        with own, its:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(its.fileno()), *arguments],
                env={**inherited_environment(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a program prints is its own
                pass_fds=[its.fileno()],
                process_group=0,  # Ctrl-C in a terminal is this process's business
            )
            self.connection = Connection(own.detach())

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def wait(self, timeout: float) -> int:
        """Wait for its end, or after *timeout* seconds make it; return the exit code.

        That is the negative number of a signal, if one has ended it.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self.kill()
        return self._process.wait()

    def kill(self) -> None:
        """End it at once, if it runs."""
        self._process.kill()

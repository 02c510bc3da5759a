"""The processes of ranks that an engine starts on its machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

HOST = "127.0.0.1"
_MODULE = "opweave.engine.executor.spawned_rank"


class Process:
    """A fresh interpreter that does what comes through a socket; never a fork of this process.

    Args:
        port: of the store on this machine where the ranks meet.

    Attributes:
        connection: to it.
    """

    def __init__(self, port: int) -> None:
        own, its = socket.socketpair()
        with own, its:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(its.fileno()), str(port)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a program prints is its own
                pass_fds=[its.fileno()],
                process_group=0,  # Ctrl-C in a terminal is the engine's business
            )
            self.connection = Connection(own.detach())

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def end(self, timeout: float) -> str:
        """Wait for its end, or after *timeout* seconds make it; return how it ended, in words."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self.kill()
        code = self._process.wait()
        if code >= 0:
            return f"exited with code {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """End it at once, if it runs."""
        self._process.kill()

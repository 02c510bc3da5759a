"""Processes of ranks that an engine starts on its own machine."""

from __future__ import annotations

import signal

from opweave.config.child_process import ChildProcess

HOST = "127.0.0.1"
_MODULE = "opweave_engine.parallel.executor.spawned_rank"


class Process(ChildProcess):
    """The process of a rank.

    Args:
        port: the port of the rendezvous store on this machine.
    """

    def __init__(self, port: int) -> None:
        super().__init__(_MODULE, str(port))

    def end(self, timeout: float) -> str:
        """Wait for its end, and kill it after *timeout* seconds; return how it ended, in words."""
        code = self.wait(timeout)
        if code >= 0:
            return f"exited with code {code}"
        return f"was killed by {signal.Signals(-code).name}"

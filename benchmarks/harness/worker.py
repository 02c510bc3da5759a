"""A process that does measured work on request."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


class Worker:
    """A process that reads requests, a line each, and answers with the seconds that each took.

    It writes a line when it is ready, and ends when its standard input does.

    Args:
        command: starts the process.
        env: its environment.
        what: the process is, for an error.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], what: str) -> None:
        self._what = what
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def seconds(self, request: object) -> float:
        """Return the seconds that a request takes.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._what} ended; see above")
        return line

"""A process that does measured work on request."""

from __future__ import annotations

import json
import re
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

_ERROR = re.compile(r"(?:\[\w+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Exit): .*)")
_EXIT_SECONDS = 10.0  # after the end of its input


class WorkerError(RuntimeError):
    """A process has ended, or does not answer in time; the message is one line."""


class Worker:
    """A process that reads requests, a line of JSON each, and writes an answer, a line each.

    It writes a line when it is ready, and ends when its standard input does. Processes that are
    created one after the other start at the same time: only the first request waits.

    Args:
        command: starts the process.
        env: its environment.
        what: a name of the process, for errors.
        start_timeout, timeout: the longest wait for the first line and for an answer, in seconds.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        what: str,
        *,
        start_timeout: float | None = None,
        timeout: float | None = None,
    ) -> None:
        self._what, self._start_timeout, self._timeout = what, start_timeout, timeout
        # Errors go to a file, because a pipe that nobody reads fills up.
        self._errors = tempfile.TemporaryFile(  # noqa: SIM115 - closed by close()
            "w+", encoding="utf-8", errors="replace"
        )
        try:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        except OSError as error:
            self._errors.close()
            raise WorkerError(f"{command[0]} cannot be run: {error.strerror}") from error

    @cached_property
    def greeting(self) -> Any:
        """The first line of the process.

        Raises:
            WorkerError: the process cannot start.
        """
        return self._receive(self._start_timeout)

    def ask(self, request: object) -> Any:
        """Return the answer to a request.

        Raises:
            WorkerError: the process has ended; the message has its last error.
        """
        _ = self.greeting
        with suppress(BrokenPipeError):  # the missing answer reports the error
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._receive(self._timeout)

    def close(self) -> None:
        """End the process."""
        try:
            with suppress(BrokenPipeError):
                self._process.communicate(timeout=_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._errors.close()

    def _receive(self, timeout: float | None) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self._process.kill()
            raise WorkerError(f"{self._what} did not answer within {timeout:g} s")
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            why = last_error(self._errors.read())
            raise WorkerError(f"{self._what} has stopped with status {status}: {why}")
        return json.loads(line)


def last_error(text: str) -> str:
    """Return the last line of *text* that is the message of an exception, or else its last line."""
    lines = text.strip().splitlines() or ["no message"]
    errors = [match[1] for line in lines if (match := _ERROR.match(line))]
    return (errors or lines)[-1].strip()

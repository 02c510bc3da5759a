"""Questions to fresh processes, several at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from opweave.config.child_process import inherited_environment

_TIMEOUT = 120.0


class ProcessFailedError(RuntimeError):
    """A fresh process did not answer; the message is the last line of what it wrote instead."""


def ask(code: str, *environments: Mapping[str, str]) -> list[Any]:
    """Run *code* in a fresh process for each of the environments, all at once; return the answers.

    Args:
        code: Python that prints one JSON document last.
        environments: variables that each process has in addition to this one's.

    Raises:
        ProcessFailedError: one of them did not print it.
    """
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**inherited_environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    return [_answer(*process.communicate(timeout=_TIMEOUT)) for process in running]


def _answer(stdout: str, stderr: str) -> Any:
    lines: Sequence[str] = stdout.splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        words = stderr.strip().splitlines() or ["it wrote nothing"]
        raise ProcessFailedError(words[-1]) from None

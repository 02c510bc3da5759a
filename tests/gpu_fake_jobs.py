"""Bodies of jobs that end in every way: for tests/test_gpu_queue.py."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_queue.measuring import alone, at


def row(value: float) -> dict[str, Any]:
    return {"name": "fake", "case": f"number {value}", "value": value, "unit": "s"}


def succeeds(value: float = 1) -> Iterator[dict[str, Any]]:
    print("working")
    yield row(value)


def fails() -> Iterator[dict[str, Any]]:
    yield row(2)
    print("about to fail")
    raise ValueError("no such shape")


def finds_a_problem() -> Iterator[dict[str, Any]]:
    yield row(3)
    yield row(4) | {"problem": "output 0 differs"}


def hangs(pid_file: str) -> Iterator[dict[str, Any]]:
    yield row(5)
    child = subprocess.Popen(["sleep", "600"])
    Path(pid_file).write_text(str(child.pid))
    with alone():
        print("waiting", flush=True)
        time.sleep(600)


def crashes() -> Iterator[dict[str, Any]]:
    yield row(6)
    at("the call with a bad address")
    ctypes.string_at(0)


def leaves() -> Iterator[dict[str, Any]]:
    yield row(7)
    os._exit(3)


def prints_garbage() -> Iterator[Any]:
    sys.stdout.buffer.write(bytes(range(256)))
    sys.stdout.flush()
    yield "not a row"


def measures(file: str) -> Iterator[dict[str, Any]]:
    with alone(), Path(file).open("a") as log:
        for _ in range(3):
            log.write(f"{os.getpid()}\n")
            log.flush()
            time.sleep(0.05)
    yield row(8)


def waits(seconds: float) -> Iterator[dict[str, Any]]:
    time.sleep(seconds)
    yield row(seconds)

"""The selection report of a vLLM process."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack
from multiprocessing import util

from opweave import ir

VARIABLE = "OPWEAVE_VLLM_REPORT"

_POLL_SECONDS = 5.0

_stack = ExitStack()
_record: ir.Record | None = None
_process: int | None = None


def start() -> None:
    """Record this process's calls if ``OPWEAVE_VLLM_REPORT=1``, and print them.

    They are printed seconds after a new kernel has run, and when the process ends.
    """
    global _record, _process
    if os.environ.get(VARIABLE) != "1" or _process == os.getpid():
        return
    _process = os.getpid()
    _stack.close()  # after a fork, it has the parent's record
    _record = _stack.enter_context(ir.record())
    # Not atexit, which does not run in a forked worker.
    util.Finalize(None, _print, exitpriority=0)
    # A server kills its workers when it shuts down, before they print their last report.
    threading.Thread(target=_watch, args=(_record,), daemon=True, name="opweave-report").start()


def report() -> str:
    """Return the calls of opweave's ops in this process: which kernel ran, and why.

    vLLM runs the model in another process unless ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
    """
    if _record is None:
        return f"opweave recorded no calls in this process; set {VARIABLE}=1 before vLLM starts"
    return str(_record)


def _watch(record: ir.Record) -> None:
    printed = 0
    while True:
        time.sleep(_POLL_SECONDS)
        count = len(record.outcomes())
        if count > printed:
            printed = count
            _print()


def _print() -> None:
    print(f"opweave's kernels in process {os.getpid()}:\n{report()}", file=sys.stderr, flush=True)

"""Shared by all benchmarks: machine description, interleaved timing, options and output."""

from harness.device import copy_speed, device_time, host_time, synchronize
from harness.machine import cache_bytes, describe_machine
from harness.options import Parser
from harness.output import as_json, out, print_json, progress, significant
from harness.program import run
from harness.timing import interleaved, microseconds, within
from harness.watch import Watch
from harness.worker import Worker, WorkerError, last_error

__all__ = [
    "Parser",
    "Watch",
    "Worker",
    "WorkerError",
    "as_json",
    "cache_bytes",
    "copy_speed",
    "describe_machine",
    "device_time",
    "host_time",
    "interleaved",
    "last_error",
    "microseconds",
    "out",
    "print_json",
    "progress",
    "run",
    "significant",
    "synchronize",
    "within",
]

"""What every benchmark here shares: the machine, interleaved timing, options, output."""

from harness.machine import cache_bytes, describe_machine
from harness.options import Parser
from harness.output import print_json, progress, significant
from harness.timing import interleaved, microseconds, within

__all__ = [
    "Parser",
    "cache_bytes",
    "describe_machine",
    "interleaved",
    "microseconds",
    "print_json",
    "progress",
    "significant",
    "within",
]

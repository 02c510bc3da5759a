"""Comparisons in processes of their own, which may crash or leak without ending the run."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import torch
import transformers
from torch._inductor import config as inductor_config

from opweave import ir
from runs.families.compare import Result

Comparison = Callable[[str], list[Result]]


def compare_all(
    names: Sequence[str], comparison: Comparison, jobs: int, cpu_seconds: int
) -> Iterator[list[Result]]:
    """Compare architectures, *jobs* at a time, and yield the results of each as it finishes.

    Processes are forked from one that has imported everything and loaded the kernels. Each may use
    *cpu_seconds*; on a busy machine, elapsed time says little.
    """
    torch.set_num_threads(1)
    inductor_config.compile_threads = 1  # a daemon process cannot start others
    ir.current_registry().ensure_ready()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    waiting, running = list(reversed(names)), dict[Connection, tuple[str, ForkProcess]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop()
            receiver, process = _start(name, comparison, cpu_seconds)
            running[receiver] = name, process
        for receiver in wait(list(running)):
            assert isinstance(receiver, Connection)
            name, process = running.pop(receiver)
            try:
                yield receiver.recv()
            except EOFError:
                process.join()
                why = f"the process ended with status {process.exitcode}"
                yield [Result(name, "failed", detail=why)]
            receiver.close()
            process.kill()
            process.join()


def _start(name: str, comparison: Comparison, cpu_seconds: int) -> tuple[Connection, ForkProcess]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_work, args=(name, comparison, cpu_seconds, sender), daemon=True
    )
    process.start()
    sender.close()
    return receiver, process


def _work(name: str, comparison: Comparison, cpu_seconds: int, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(silent, stream.fileno())
    sender.send(comparison(name))

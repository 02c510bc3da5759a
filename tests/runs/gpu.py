"""Uses minutes on a GPU well: runs what is due of a queue of checks and benchmarks.

    make gpu                                          10 minutes of the queue
    python tests/runs/gpu.py --dry-run                what would run, and why; needs no GPU
    python tests/runs/gpu.py --budget 300 --only decode attention/512
    python tests/runs/gpu.py --out "$OUT"             a copy of all results, written as jobs end

A call of every op with each implementation comes first, then the conformance of what has changed,
decoding and prompts of a model of the 1B shape against transformers, single kernels, and greedy
tokens of several families against the CPU. Each job runs in a subprocess with a time limit; its
result is written as soon as it ends, to benchmarks/results/gpu_queue.json and .md, and the next run
goes on from there. Jobs prepare side by side and measure alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT / path)
    for path in ("packages/opweave/src", "packages/opweave-engine/src", "benchmarks", "tests/runs")
]

RESULTS = ROOT / "benchmarks" / "results"
TRIED = ROOT / "build" / "gpu"  # for results that are not of a GPU
_RESERVE = 2.0  # seconds of the budget, to end processes and write results


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"gpu.py: {' '.join(message.split())}\n")


def parser() -> Parser:
    """Return the parser of the command line."""
    found = Parser(prog="gpu.py", description=__doc__.partition("\n")[0])
    add = found.add_argument
    add("--budget", type=float, default=600.0, metavar="SECONDS", help="of the run (default: 600)")
    add(
        "--only", nargs="+", default=[], metavar="NAME",
        help="jobs, stages, or the beginning of names, as decode/64",
    )  # fmt: skip
    add("--again", action="store_true", help="run jobs that have passed, too")
    add("--dry-run", action="store_true", help="print the queue, and why each job is due")
    add("--list", action="store_true", help="print the names of all jobs")
    add("--json", action="store_true", help="print JSON")
    add("--out", type=Path, metavar="FOLDER", help="copy results and state there, too")
    add(
        "--state", type=Path, metavar="FILE",
        help="of the queue (default: benchmarks/results/gpu_queue.json)",
    )  # fmt: skip
    add(
        "--lanes", type=int, default=default_lanes(), metavar="N",
        help="jobs that run at once (default: half the cores, at most 8)",
    )  # fmt: skip
    add(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu tries the jobs without a GPU, with results in build/gpu",
    )  # fmt: skip
    add("--size", choices=("full", "tiny"), default="full", help="of the models")
    return found


def default_lanes() -> int:
    """Return how many jobs run at once: each keeps a core busy, and compiling keeps more."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return 0, or 1 if a job that ran did not pass."""
    program = parser()
    options = program.parse_args(arguments)
    if options.budget <= 0 or options.lanes < 1:
        program.error(
            f"--budget {options.budget:g} --lanes {options.lanes}: both must be above zero"
        )
    try:
        import torch

        from gpu_queue import jobs as catalog
        from gpu_queue import metadata, naming, pool, show
        from gpu_queue.plan import plan
        from gpu_queue.process import StartError, WorkerProcess
        from gpu_queue.results import NAME, Results
        from gpu_queue.state import StateError
        from opweave.ir.errors import did_you_mean
    except ImportError as error:
        program.error(f"{error} (Python: {sys.executable}). make gpu PYTHON=... names another.")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        program.error(f"--out {str(options.out)!r} is not a folder")
    jobs = catalog.all_jobs(options.device, options.size)
    if options.only:
        chosen, unknown = naming.select(jobs, options.only)
        if unknown:
            stages = [stage.name for stage in catalog.STAGES]
            hint = did_you_mean(unknown[0], stages, naming.names(jobs))
            program.error(f"--only: unknown job or stage {unknown[0]!r}. {hint}")
        jobs = chosen
    is_real = options.device == "cuda" and options.size == "full"
    state = options.state or (RESULTS if is_real else TRIED) / f"{NAME}.json"
    try:
        results = Results(state, options.out, BEGAN, quiet=options.json)
    except StateError as error:
        program.error(str(error))
    planned = plan(jobs, catalog.STAGES, results.records, again=options.again)
    if options.list or options.dry_run:
        print_queue = show.names if options.list else show.queue
        print_queue(planned, results, as_json=options.json)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        program.error(f"torch {torch.__version__} finds no GPU; --dry-run prints the queue")
    deadline, paths = BEGAN + options.budget - _RESERVE, metadata.folders()
    try:
        pool.run(
            pool.Queue(planned, catalog.STAGES, BEGAN, options.budget - _RESERVE),
            lambda gate: WorkerProcess(options.device, deadline, gate, paths=paths),
            results.add,
            deadline=deadline,
            lanes=options.lanes,
        )
    except StartError as error:
        program.error(f"the processes of jobs do not start: {error}")
    show.outcome(planned, results, as_json=options.json)
    return int(any(each.status not in ("passed", "stopped") for each in results.ran.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # all results are written
        sys.exit(130)

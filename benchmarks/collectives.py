"""Collectives between two ranks on this machine: shared memory against gloo.

    python benchmarks/collectives.py            a table
    python benchmarks/collectives.py --json     one object

Two processes with one thread each call one collective after the other; a figure is the median over
rounds of the microseconds per call, on rank 0. Both ways are measured in turns. `ratio` is gloo's
time over shared memory's in the same round. On a machine whose cores are busy, the figures say more
about the scheduler of the system than about either.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.distributed import FileStore

from harness import Parser, describe_machine, out, print_json, run
from opweave_engine.errors import CommunicatorError
from opweave_engine.parallel.communicators import (
    RankGroup,
    SharedMemoryCommunicator,
    TorchCommunicator,
)

RANKS = 2
CALLS = 50
SHAPES = [(1, 2048), (16, 512), (16, 2048), (512, 2048)]


def microseconds(call: Callable[[Tensor], Any], x: Tensor, meet: Callable[[], None]) -> float:
    """Return the time per call, from where both ranks begin."""
    meet()
    start = perf_counter_ns()
    for _ in range(CALLS):
        call(x)
    return (perf_counter_ns() - start) / CALLS / 1e3


def run_rank(rank: int, folder: Path, rounds: int) -> dict[str, list[list[float]]]:
    """Return the times of both ways, by case and round."""
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), RANKS)
    shared = SharedMemoryCommunicator(
        RankGroup(rank, RANKS, torch.device("cpu"), "gloo", store, 60.0)
    )
    if not shared.is_shared:
        raise CommunicatorError("this machine shares no memory between processes")
    # The base class's methods on the same group: gloo.
    ways = {
        "all_reduce": [shared.all_reduce, partial(TorchCommunicator.all_reduce, shared)],
        "all_gather": [shared.all_gather, partial(TorchCommunicator.all_gather, shared)],
    }
    found: dict[str, list[list[float]]] = {}
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for name, (ours, theirs) in ways.items():
                for shape in SHAPES:
                    x = torch.randn(shape)
                    times = [microseconds(way, x, shared.barrier) for way in (ours, theirs)]
                    found.setdefault(f"{name} {list(shape)}", []).append(times)
    shared.close()
    return {case: times[1:] for case, times in found.items()}  # the first round warms up


def rows(found: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """Return the rows of the result."""
    result = []
    for case, times in found.items():
        name, _, shape = case.partition(" ")
        result.append(
            {
                "name": f"collective.{name}",
                "case": f"float32{shape}, {RANKS} ranks",
                "value": round(statistics.median(ours for ours, _ in times), 2),
                "unit": "us",
                "baseline": "gloo",
                "ratio": round(statistics.median(theirs / ours for ours, theirs in times), 2),
            }
        )
    return result


def main() -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(RANKS) as pool:
        ranks = [(rank, Path(folder), options.rounds) for rank in range(RANKS)]
        result = rows(pool.starmap(run_rank, ranks, chunksize=1)[0])
    if options.json:
        print_json(describe_machine(), result)
        return 0
    table = Table("collective", "tensor", "us, shared memory", "times as fast as gloo")
    for row in result:
        table.add_row(row["name"], row["case"], f"{row['value']:.1f}", f"{row['ratio']:.1f}")
    out.print(table)
    return 0


if __name__ == "__main__":
    run(main)

"""The kernels of opweave_c against eager torch, Inductor, and what the machine's memory allows.

    python benchmarks/kernels.py --quick     a few kernels, in less than a minute
    python benchmarks/kernels.py --json      everything, as one object

Every kernel x dtype x tokens x hidden size x threads is a cell. Its contenders take turns: each
round times all of them in a new order, by so many calls that the clock can tell; figures are
medians over rounds, in microseconds per call. A fixed piece of work that takes longer than usual
shows that other processes disturb a measurement, which is then repeated, regardless of its result,
for up to `--patience` seconds per cell. A cell within 7 % of a bar, or of which more than a tenth
was `disturbed`, is measured again for four times as long, and that result counts. `--disturbed`
repeats cells of a saved table that are still disturbed by more than that.

Ours is the IR op in eager mode with opweave_c selected: with a `fresh` output that the call
allocates, and a `reused` one: given to the native function, or the input itself where the op may
write into it. Eager is the op's definition in plain torch; Inductor is torch.compile of that, for
dynamic tokens, but one token alone. Both have fresh outputs only. `ratio` is the faster of the two
over ours. The allocator keeps what is freed, so that none of them pays for page faults.

From 2048 tokens on, and always for weights and cached keys, calls go round a ring of inputs and
outputs four times the size of the last cache, so that no data is in it. `stream_share` is the bytes
that a call must move, over its time, as a share of the machine's stream in the same rounds: of a
copy, which counts what it reads and what it writes, or of a read for weights and cached keys.
`limit_share` is the least time that the memory allows over ours: what is written and as much of
what is read at the speed of a copy, or of an update in place, the rest at that of a read. An op
that has to see every input before its first result, `dynamic_per_tensor_quant_fp8`, moves its
inputs twice. The bar is 80 % of the stream, of cached keys 60 %.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from harness import Parser, Watch, describe_machine, out, print_json, progress, run
from kernel_cells import plot, remeasure, results, tables
from kernel_cells.allocator import describe_allocator, keep_freed_memory
from kernel_cells.cases import PROVIDER, ops_with_kernels, ops_without_case
from kernel_cells.cell import Cell, Grid, cells_of
from kernel_cells.measure import Clock, Results, measure_family
from kernel_cells.precompile import precompile
from kernel_cells.stream import Stream, cached_speeds
from kernel_cells.summary import cells_of_rows
from opweave import native
from opweave.ir.errors import did_you_mean
from opweave.native.builder import digest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FULL = {
    "ops": None,
    "dtypes": list(DTYPES.values()),
    "tokens": [1, 16, 256, 2048],
    "hidden": [2048, 4096],
    "threads": [1, 2],
    "rounds": 11,
    "patience": 2.0,
}
QUICK = {
    "ops": ["rms_norm", "silu_and_mul", "dynamic_per_token_quant_fp8", "paged_attention"],
    "dtypes": [torch.bfloat16],
    "tokens": [1, 256, 2048],
    "hidden": [4096],
    "threads": [1],
    "rounds": 5,
    "patience": 0.5,
}
RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    grid, rounds, patience = _grid(options, parser)
    command = [Path(__file__).name, *(sys.argv[1:] if arguments is None else arguments)]
    machine = _describe(f"python benchmarks/{shlex.join(command)}", grid)
    families, saved = cells_of(grid), None
    if options.disturbed:
        saved = _saved(machine, parser)
        families = remeasure.disturbed_cells(families, saved[1])
        if not families:
            out.print("the saved table has no cell that was disturbed")
            return 0
    conditions, found = measure(families, rounds, patience, grid)
    machine |= conditions
    if saved:
        machine, found = remeasure.merge(saved, (machine, found))
    if options.json:
        print_json(machine, found.rows, skipped=found.skipped)
    else:
        _print(machine, found)
    cells = cells_of_rows(found.rows)
    if options.plot:
        options.plot.write_text(plot.draw(cells, machine), encoding="utf-8")
    if options.save:
        results.write(RESULTS, machine, found)
    return 0


def measure(
    families: list[list[Cell]], rounds: int, patience: float, grid: Grid
) -> tuple[dict[str, Any], Results]:
    """Measure every cell; return the memory's streams and what was disturbed, and the rows."""
    found, streams, disturbed = Results(), {}, {}
    with torch.inference_mode(), progress(quiet=not sys.stderr.isatty()) as bar:
        compiling = bar.add_task("compiling", total=len(families))
        for _ in precompile(families):
            bar.advance(compiling)
        bar.remove_task(compiling)
        measuring = bar.add_task("measuring", total=sum(map(len, families)))
        for threads in grid.threads:
            torch.set_num_threads(threads)
            clock = Clock(rounds, Watch(patience), Stream())
            for family in families:
                if family[0].threads == threads:
                    bar.update(measuring, description=family[0].name)
                    measure_family(family, clock, found)
                    bar.advance(measuring, len(family))
            streams[str(threads)] = {"out of cache": clock.stream.summary(), **cached_speeds()}
            disturbed[str(threads)] = clock.watch.summary()
    return {"stream_gb_per_second": streams, "disturbed": disturbed}, found


def _describe(command: str, grid: Grid) -> results.Machine:
    status = native.status()
    return describe_machine() | {
        "allocator": describe_allocator(keep_freed_memory()),
        "threads": list(grid.threads),
        "isa": status.isa,
        "kernels": digest(status.path or "")[:16],
        "commands": [command],
        "again": [],
    }


def _saved(machine: results.Machine, parser: Parser) -> results.Table:
    """Return the table that is saved for this machine; ends the program if it does not exist."""
    try:
        saved = results.read(RESULTS, machine["isa"])
    except OSError as error:
        parser.error(f"--disturbed: {error.strerror}: {error.filename}; --save writes it")
    if found := remeasure.differences(saved[0], machine):
        parser.error(f"--disturbed: the saved table has {found}; measure all of it, with --save")
    return saved


def _print(machine: dict[str, Any], found: Results) -> None:
    cells = cells_of_rows(found.rows)
    tables.print_cells(cells, out)
    tables.print_omitted(cells, found.skipped, out)
    tables.print_machine(machine, out)
    tables.print_below_the_bar(cells, out)


def _parser() -> Parser:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="a few cells, in less than a minute")
    parser.add_argument("--ops", nargs="+", metavar="OP", help="measure these ops only")
    parser.add_argument("--dtypes", nargs="+", type=_dtype, metavar="DTYPE", help=", ".join(DTYPES))
    for name, what in (
        ("tokens", "numbers of tokens"),
        ("hidden", "hidden sizes, multiples of 128"),
        ("threads", "numbers of threads"),
    ):
        parser.add_argument(f"--{name}", nargs="+", type=_positive, metavar="N", help=what)
    parser.add_argument("--rounds", type=_positive, metavar="N", help="how often to measure a cell")
    parser.add_argument(
        "--patience", type=_seconds, metavar="S", help="how long a cell may wait for quiet"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw what was found")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/kernels_ISA.*")
    parser.add_argument(
        "--disturbed", action="store_true", help="measure what was disturbed in the saved table"
    )
    return parser


def _grid(options: argparse.Namespace, parser: Parser) -> tuple[Grid, int, float]:
    """Return what to measure, how often, how patiently; ends the program if it makes no sense."""
    if not native.available():
        parser.error(f"the native module is missing: {native.status().reason_missing}")
    missing = ops_without_case()
    if missing:
        parser.error(f"no case in kernel_cells/cases.py for {', '.join(missing)}; add one each")
    known = [op.name for op in ops_with_kernels()]
    defaults = QUICK if options.quick else FULL
    chosen: dict[str, Any] = {
        name: default if (given := getattr(options, name)) is None else given
        for name, default in defaults.items()
    }
    for name in chosen["ops"] or []:
        if name not in known:
            parser.error(
                f"--ops: {name!r} has no kernel in {PROVIDER}. {did_you_mean(name, known)}"
            )
    for width in chosen["hidden"]:
        if width % 128:
            parser.error(f"--hidden: {width} is not a multiple of 128, the size of a head")
    cores = os.cpu_count() or 1
    if max(chosen["threads"]) > cores:
        parser.error(f"--threads: {max(chosen['threads'])} threads, but the machine has {cores}")
    rounds, patience = chosen.pop("rounds"), chosen.pop("patience")
    chosen["ops"] = chosen["ops"] or known
    if rounds < 2:
        parser.error("--rounds must be at least 2")
    if options.plot and not options.plot.absolute().parent.is_dir():
        parser.error(f"--plot: there is no folder {str(options.plot.parent)!r}")
    grid = Grid(**{name: list(dict.fromkeys(values)) for name, values in chosen.items()})
    return grid, rounds, patience


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"no dtype {name!r}. {did_you_mean(name, DTYPES)}")
    return DTYPES[name]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


if __name__ == "__main__":
    run(main)

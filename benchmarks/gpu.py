"""The Triton kernels against eager torch, Inductor, and what the GPU's memory allows.

    python benchmarks/gpu.py              a table
    python benchmarks/gpu.py --save       the same, into results/gpu.md and .json

Every kernel on some numbers of tokens of 4,096 bfloat16 is a cell. Its contenders take turns, and
figures are medians over rounds: of the device's time in microseconds, by events, with the last
cache emptied before each call (``triton.testing.do_bench``); and of the host's, which is what a
call costs while the device has other work. Ours is the IR op with triton selected, eager is the
op's definition in plain torch, Inductor is torch.compile of that for any number of tokens. `share`
is the time that a copy of the same size takes over ours. Emptying the cache takes the device about
0.06 ms: of a call that costs the host more, the device's time is that of waiting for the host.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from harness import (
    Parser,
    as_json,
    copy_speed,
    describe_machine,
    device_time,
    host_time,
    out,
    print_json,
    progress,
    run,
    significant,
)
from kernel_cells.cases import CASES
from kernel_cells.cell import Cell, dynamic_dims
from kernel_cells.contenders import torch_baseline
from kernel_cells.shape import Shape
from opweave import ir
from opweave.ir.errors import did_you_mean

PROVIDER = "triton"
DEVICE = "cuda"
HIDDEN = 4096
TOKENS = (16, 256, 2048, 8192)
ATTENTION = ((1, 8192), (16, 2048), (64, 2048), (2048, 2048))
"""Tokens, one of each sequence but for the last, and the keys that each sees."""
ROUNDS = 3
RESULTS = Path(__file__).parent / "results"
Call = Callable[[], Any]


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="gpu.py", description="The Triton kernels on a GPU.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--save", action="store_true", help="write results/gpu.*")
    parser.add_argument("--ops", nargs="+", metavar="OP", help="measure these ops only")
    parser.add_argument(
        "--compile", action="store_true", help="fill the caches of compilers, no more"
    )
    options = parser.parse_args(arguments)
    names = ops_with_kernels()
    for name in options.ops or ():
        if name not in names:
            parser.error(f"no kernel for {name!r}. {did_you_mean(name, names)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    cells = [cell for name in options.ops or names for cell in cells_of(name)]
    if options.compile:
        for cell in cells:
            inputs = on_device(cell.inputs())
            baselines(cell, inputs)
            cell.op.using(f"{PROVIDER}!")(*inputs)
        return 0
    machine = describe_machine() | {
        "gpu": torch.cuda.get_device_name(),
        "copy_gb_per_second": significant(copy_speed(DEVICE)),
    }
    rows = []
    with progress(quiet=options.json) as bar, torch.inference_mode():
        for cell in bar.track(cells, description="cells"):
            rows += measured(cell, machine["copy_gb_per_second"])
    if options.json:
        print_json(machine, rows)
    else:
        out.print(table(rows))
        out.print(f"{machine['gpu']}: copies {machine['copy_gb_per_second']} GB/s")
    if options.save:
        save(machine, rows)
    return 0


def ops_with_kernels() -> list[str]:
    registry = ir.current_registry()
    registry.ensure_ready()
    return sorted(name for name, op in registry.ops.items() if PROVIDER in op.impls)


def cells_of(name: str) -> Iterator[Cell]:
    for index, case in enumerate(CASES[name]):
        shapes = ATTENTION if case.attends else [(tokens, 0) for tokens in TOKENS]
        for tokens, context in shapes:
            yield Cell(name, index, Shape(tokens, HIDDEN, torch.bfloat16, context), 1)


def on_device(arguments: Sequence[Any], device: str = DEVICE) -> tuple[Any, ...]:
    return tuple(a.to(device) if isinstance(a, Tensor) else a for a in arguments)


_compiled: dict[tuple[Any, ...], Call] = {}


def baselines(cell: Cell, arguments: tuple[Any, ...], backend: str = "inductor") -> dict[str, Call]:
    """Return eager torch, what Inductor makes of it, and torch's own kernel if there is one."""
    plain = torch_baseline(cell)
    if cell.family not in _compiled:
        torch._dynamo.reset()
        _compiled[cell.family] = torch.compile(plain, backend=backend)
    compiled = _compiled[cell.family]
    if cell.shape.tokens > 1:
        for value, dims in zip(arguments, dynamic_dims(cell), strict=True):
            for dim in dims:
                torch._dynamo.maybe_mark_dynamic(value, dim)
    compiled(*arguments)
    found: dict[str, Call] = {
        "eager": lambda: plain(*arguments),
        "inductor": lambda: compiled(*arguments),
    }
    aten = cell.op.impls.get("aten")
    if aten and aten.rejection(cell.op.bind(*arguments)) is None:
        found["aten"] = lambda: aten.impl_fn(*arguments)
    return found


def measured(
    cell: Cell,
    copy_gb_per_second: float,
    *,
    device: str = DEVICE,
    provider: str = PROVIDER,
    backend: str = "inductor",
) -> Iterator[dict[str, Any]]:
    """Yield the row of *cell*: the kernel of *provider*, and what *backend* compiles."""
    arguments = on_device(cell.inputs(), device)
    op = cell.op.using(f"{provider}!")
    ours = op.maybe_inplace if cell.op.impls[provider].inplace else op
    result = ours(*arguments)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    calls = {provider: lambda: ours(*arguments), **baselines(cell, arguments, backend)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    host: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(device_time(call, device))
            host[name].append(host_time(call, device))
    traffic = sum(cell.case.traffic(arguments, outputs))
    us = {name: significant(statistics.median(found)) for name, found in times.items()}
    yield {
        "op": cell.name,
        "variant": cell.case.variant,
        "tokens": cell.shape.tokens,
        "context": cell.shape.context,
        "us": us,
        "host_us": {name: significant(statistics.median(found)) for name, found in host.items()},
        "share": significant(traffic / copy_gb_per_second / 1e3 / us[provider], 3),
    }


def heading() -> list[str]:
    return ["op", "tokens", "triton, us", "eager", "Inductor", "aten", "share", "host, us", "eager"]


def cells_in_row(row: dict[str, Any]) -> list[str]:
    us, host = row["us"], row["host_us"]
    context = f" x {row['context']} keys" if row["context"] else ""
    name = " ".join(filter(None, (row["op"], row["variant"])))

    def ratio(other: str) -> str:
        return f"{us[other] / us['triton']:.2f}" if other in us else ""

    return [
        name,
        f"{row['tokens']}{context}",
        f"{us['triton']:.1f}",
        *map(ratio, ("eager", "inductor", "aten")),
        f"{row['share']:.0%}",
        f"{host['triton']:.0f}",
        f"{host['eager']:.0f}",
    ]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    found = Table(*heading(), box=None)
    for row in rows:
        found.add_row(*cells_in_row(row))
    return found


def save(machine: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write a page and the whole output."""
    (RESULTS / "gpu.json").write_text(as_json(machine, rows=rows), encoding="utf-8")
    command = " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])
    lines = [
        "# The Triton kernels on a GPU",
        "",
        f"`{command}` on {time.strftime('%Y-%m-%d')};",
        "the whole output is in [gpu.json](gpu.json), and what is measured how is at the top of",
        "[gpu.py](../gpu.py).",
        "",
        f"{machine['gpu']}, which copies {machine['copy_gb_per_second']} GB/s; torch",
        f"{machine['torch']}. Columns of others are their time over ours; the share is that of the",
        "copy's speed; the last two are the host's time for a call, ours and that of eager torch.",
        "Where that is more than about 60 us, the device's time is that of waiting for the host.",
        "",
        f"| {' | '.join(heading())} |",
        f"|{'---|' * len(heading())}",
        *(f"| {' | '.join(cells_in_row(row))} |" for row in rows),
    ]
    (RESULTS / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)

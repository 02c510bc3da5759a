"""Writes ``results/kernels_ISA.md``, with the chart and the compressed rows next to it."""

from __future__ import annotations

import itertools
import json
import lzma
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kernel_cells import plot
from kernel_cells.measure import Results
from kernel_cells.summary import Cell, Row, below_the_bar, cells_of_rows

Machine = dict[str, Any]
Table = tuple[Machine, Results]


def write(folder: Path, machine: Machine, found: Results) -> None:
    """Write a page, a chart and the rows into *folder*, one of each per instruction set."""
    cells = cells_of_rows(found.rows)
    name = _name(machine["isa"])
    document = {"machine": machine, "columns": _columns(found.rows), "skipped": found.skipped}
    packed = lzma.compress(json.dumps(document).encode(), preset=9 | lzma.PRESET_EXTREME)
    (folder / f"{name}.json.xz").write_bytes(packed)
    chart = plot.draw(cells, machine, tooltips=False)
    (folder / f"{name}.svg").write_text(chart, encoding="utf-8")
    page = "\n".join(_page(name, cells, machine, found))
    (folder / f"{name}.md").write_text(page + "\n", encoding="utf-8")


def read(folder: Path, isa: str) -> Table:
    """Return the table that :func:`write` stored for *isa*; raise OSError if it does not exist."""
    with lzma.open(folder / f"{_name(isa)}.json.xz", "rt", encoding="utf-8") as file:
        found = json.load(file)
    return found["machine"], Results(_rows(found["columns"]), found["skipped"])


def _columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return a column per key, with null where a row lacks it: half the size once compressed."""
    return {key: [row.get(key) for row in rows] for key in dict.fromkeys(itertools.chain(*rows))}


def _rows(columns: dict[str, list[Any]]) -> list[Row]:
    return [
        {key: value for key, value in zip(columns, values, strict=True) if value is not None}
        for values in zip(*columns.values(), strict=True)
    ]


def _name(isa: str) -> str:
    return f"kernels_{isa}"


def _page(name: str, cells: Sequence[Cell], machine: Machine, found: Results) -> Iterator[str]:
    allocator = ", ".join(f"{name}: {value}" for name, value in machine["allocator"].items())
    yield "# Kernels against eager torch, Inductor and the memory"
    yield ""
    yield ", then ".join(f"`{command}`" for command in machine["commands"])
    yield f"on {time.strftime('%Y-%m-%d')}. All rows: [{name}.json.xz]({name}.json.xz), by columns."
    yield "Method: the docstring of [kernels.py](../kernels.py)."
    yield ""
    yield f"{machine['processor']}, {machine['cores']} cores, {machine['isa']}; Python "
    yield f"{machine['python']}, torch {machine['torch']}; load {machine['load']:.1f} at the start."
    yield f"Allocator: {allocator}."
    yield ""
    yield "Measured again because others computed on the same cores, and disturbed but counted,"
    yield f"{disturbances(machine['disturbed'])}."
    for again in machine["again"]:
        yield ""
        yield "Cells of which more than a tenth was disturbed were measured again afterwards,"
        yield f"regardless of the result ({again['cells']} cells):"
        yield f"{disturbances(again['disturbed'])}."
    yield ""
    yield f"![every cell]({name}.svg)"
    yield ""
    yield from _streams(machine["stream_gb_per_second"])
    yield from _kernels(cells)
    yield from _below(cells)
    yield from _omitted(cells, found)


def disturbances(disturbed: dict[str, dict[str, float]]) -> str:
    """Say how much others disturbed, by numbers of threads."""
    return ", ".join(
        f"on {threads} thread{'s' if threads != '1' else ''}: {found['repeated']:,} and "
        f"{found['kept']:,} of {found['taken']:,}"
        for threads, found in disturbed.items()
    )


def _streams(streams: dict[str, dict[str, dict[str, float]]]) -> Iterator[str]:
    yield "## The machine's streams, GB/s"
    yield ""
    yield "| threads | arrays of | copy | update in place | read |"
    yield "|---|---|---|---|---|"
    for threads, sizes in streams.items():
        for size, speeds in sizes.items():
            figures = " | ".join(str(speeds.get(w, "")) for w in ("copy", "update", "read"))
            yield f"| {threads} | {size} | {figures} |"
    yield ""


def _kernels(cells: Sequence[Cell]) -> Iterator[str]:
    tokens = sorted({cell["tokens"] for cell in cells})
    for threads in sorted({cell["threads"] for cell in cells}):
        yield f"## {threads} thread{'s' if threads > 1 else ''}"
        yield ""
        yield "Time of eager / ours, time of Inductor / ours, with fresh outputs; then, where the"
        yield "data is in no cache, the share of the stream's bandwidth and, in brackets, of what"
        yield "the memory allows, both with reused outputs."
        yield ""
        yield f"| kernel | dtype, size | {' | '.join(f'T = {count}' for count in tokens)} |"
        yield "|---" * (2 + len(tokens)) + "|"
        own = [cell for cell in cells if cell["threads"] == threads]
        for (kernel, case), group in itertools.groupby(own, lambda c: (c.kernel, _line(c))):
            found: dict[int, list[str]] = {count: [] for count in tokens}
            for cell in group:
                found[cell["tokens"]].append(_figures(cell))
            yield f"| {kernel} | {case} | {' | '.join(map('; '.join, found.values()))} |"
        yield ""


def _line(cell: Cell) -> str:
    return f"{cell['dtype']}, {cell['hidden']}"


def _figures(cell: Cell) -> str:
    keys = f"{cell['context']} keys: " if cell["context"] else ""
    ratios = [cell.over("eager"), cell.over("inductor")]
    figures = ", ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
    return keys + figures + _shares(cell)


def _shares(cell: Cell) -> str:
    if cell.share is None or cell.limit_share is None:
        return ""
    return f", {cell.share:.0%} ({cell.limit_share:.0%})"


def _below(cells: Sequence[Cell]) -> Iterator[str]:
    found = below_the_bar(cells)
    yield f"## Below the bar: {len(found)} of {len(cells)} cells"
    yield ""
    yield "Slower than eager or Inductor, or less than the share of the stream that is asked for."
    with_bar = [cell for cell in cells if cell.least_share is not None]
    at_limit = sum((cell.limit_share or 0) >= (cell.least_share or 0) for cell in with_bar)
    yield f"Of what the memory allows, {at_limit} of {len(with_bar)} cells reach that share."
    yield ""
    for cell in found:
        where = f"{cell.kernel}: {cell.case}, threads: {cell['threads']}"
        yield f"- {where}: {', '.join(cell.shortfalls)}"
    yield ""


def _omitted(cells: Sequence[Cell], found: Results) -> Iterator[str]:
    without = [cell for cell in cells if "no_inductor" in cell.rows[0]]
    if not without and not found.skipped:
        return
    yield "## Not measured"
    yield ""
    for row in found.skipped:
        yield f"- {row['name']}: {row['case']}: {row['reason']}"
    for cell in without:
        yield f"- {cell.kernel}: {cell.case}, by Inductor: {cell['no_inductor']}"

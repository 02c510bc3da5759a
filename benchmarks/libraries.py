"""opweave's kernels against those of an installed library, op by op.

    python benchmarks/libraries.py                       vLLM's CPU kernels, where it is installed
    python benchmarks/libraries.py --library flashinfer  another provider
    python benchmarks/libraries.py --save                also writes benchmarks/results/libraries.md

Each op that both implement runs as in ``opweave bench OP``: the result is checked against the
definition, and a figure is the median of interleaved rounds, on one thread unless OMP_NUM_THREADS
says otherwise. `ratio` is the time of the library's kernel over that of the default provider.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from harness import Parser, describe_machine, out, print_json, progress, run, significant
from opweave import ir

RESULTS = Path(__file__).parent / "results" / "libraries.md"
INTRODUCTION = """\
# opweave's kernels and those of a library

`{command}` on {processor}, {threads} thread(s), torch {torch}. Times in
microseconds of `opweave bench`, with the sizes of a model of 8B parameters. Above 1, the default
provider is faster than {library}.

Median of the {count} ratios: {median:.2f}; {faster} are above 1.05, {slower} below 0.95.

| op | dtype | tokens | default | µs | {library}, µs | ratio |
|---|---|---|---|---|---|---|
"""


def shared_ops(library: str) -> list[str]:
    """Return the names of the ops that *library* implements."""
    registry = ir.current_registry()
    registry.ensure_ready()
    return [op.name for op in registry.ops.values() if library in op.impls]


def bench(op: str, dtype: str, tokens: list[int]) -> list[dict[str, Any]]:
    """Return the rows of ``opweave bench`` for an op."""
    command = [sys.executable, "-m", "opweave", "bench", op, "--json", "--dtype", dtype]
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    command += ["--tokens", *map(str, tokens)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    if not done.stdout:
        raise RuntimeError(f"opweave bench {op} --dtype {dtype} ended: {done.stderr.strip()}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def compared(
    rows: list[dict[str, Any]], op: str, dtype: str, library: str
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of tokens that the library and the default provider took."""
    timed = [row for row in rows if row["time"]]
    theirs = {row["tokens"]: row for row in timed if row["provider"] == library}
    for row in timed:
        if row["default"] and (other := theirs.get(row["tokens"])):
            ours, its = row["time"]["microseconds"], other["time"]["microseconds"]
            yield {
                "name": f"libraries.{op}",
                "case": f"{dtype}, {row['tokens']} tokens",
                "value": significant(ours),
                "unit": "us",
                "provider": row["provider"],
                "baseline": significant(its),
                "ratio": significant(its / ours),
            }


def markdown(rows: list[dict[str, Any]], library: str) -> str:
    """Return the table as a page."""
    ratios = [row["ratio"] for row in rows]
    machine = describe_machine()
    head = INTRODUCTION.format(
        command=" ".join(["python benchmarks/libraries.py", *sys.argv[1:]]),
        library=library,
        count=len(ratios),
        median=statistics.median(ratios),
        faster=sum(ratio > 1.05 for ratio in ratios),
        slower=sum(ratio < 0.95 for ratio in ratios),
        **machine,
    )
    cells = (
        (
            row["name"].removeprefix("libraries."),
            *row["case"].removesuffix(" tokens").split(", "),
            row["provider"], f"{row['value']:g}", f"{row['baseline']:g}", f"{row['ratio']:.2f}",
        )
        for row in rows
    )  # fmt: skip
    return head + "".join(f"| {' | '.join(each)} |\n" for each in cells)


def main() -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", default="vllm_c", help="the provider of its kernels")
    parser.add_argument("--ops", nargs="+", help="some of the ops that both implement")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 256])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/libraries.md")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args()
    ops = shared_ops(options.library)
    if not ops:
        parser.error(
            f"no op has an implementation by {options.library!r}; is the library installed?"
        )
    if unknown := sorted(set(options.ops or ()) - set(ops)):
        parser.error(f"--ops {' '.join(unknown)}: {options.library} implements {', '.join(ops)}")
    cases = [(op, dtype) for op in options.ops or ops for dtype in options.dtypes]
    rows = []
    with progress(quiet=options.json) as bar:
        for op, dtype in bar.track(cases, description=options.library):
            found = bench(op, dtype, options.tokens)
            rows += compared(found, op, dtype, options.library)
    if options.save:
        RESULTS.write_text(markdown(rows, options.library), encoding="utf-8")
    if options.json:
        print_json(describe_machine(), rows)
        return 0
    table = Table("op", "case", "provider", "µs", options.library, "ratio")
    for row in rows:
        table.add_row(
            row["name"], row["case"], row["provider"],
            *(str(row[key]) for key in ("value", "baseline", "ratio")),
        )  # fmt: skip
    out.print(table)
    return 0


if __name__ == "__main__":
    run(main)

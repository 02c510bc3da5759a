"""opweave's engine against other engines on this CPU: vLLM, OpenVINO, transformers and llama.cpp.

    make bench-peers                             installs them, measures, and saves the results
    python benchmarks/peers.py                   the same without saving
    python benchmarks/peers.py --json            one object
    python benchmarks/peers.py --size tiny       small models, to try it: the figures mean little
    python benchmarks/peers.py --rows decode     one part of the table
    python benchmarks/peers.py --engines vLLM    one of the engines

Each engine is installed into an environment of its own in build/peers, and runs in processes of its
own, which take turns. Models with random weights are written there once, and converted for each
engine. Both together take 15 GB. An engine that cannot be installed or that does not run on this
CPU is a line "not measured". A figure is the median over rounds. `ratio` above 1: opweave is
faster.

``peers.requests``: 32 requests at once, tokens generated in a second, float32 and bfloat16.
``peers.decode``: tokens in a second of one request, without the time of its prompt; in bfloat16,
and with weights of four bits.
``peers.prompts``: tokens of a prompt of 512 in a second.
``peers.scaling``: decoding in float32 with the most threads; baseline: with the fewest.

The large model runs with the most threads only. `equal_tokens` is the share of the tokens before
the first difference of an answer from opweave's: engines round differently, most of all bfloat16.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from harness import (
    Parser,
    WorkerError,
    as_json,
    describe_machine,
    out,
    print_json,
    progress,
    run,
)
from peer_cells import report
from peer_cells.contenders import OPWEAVE
from peer_cells.environments import ENVIRONMENTS, ROOT, install
from peer_cells.models import Models
from peer_cells.table import PEERS, ROWS, groups, measure

RESULTS = Path(__file__).parent / "results"
PICTURE = ROOT / "docs" / "images" / "peers.svg"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=("tiny", "full"), default="full", help="of the models")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--engines", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/peers.* and the picture"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if min(options.threads) < 1:
        parser.error("--threads must be at least 1")
    try:
        rows = table(options)
    except WorkerError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    machine = describe_machine()
    if options.save:
        command = shlex.join(["python", "benchmarks/peers.py", *(arguments or sys.argv[1:])])
        save(rows, machine, command)
    if options.json:
        print_json(machine, rows)
    return 0


def table(options: Any) -> list[dict[str, Any]]:
    """Return the rows, which are printed as they are measured."""

    def note(text: str) -> None:
        print(text, file=sys.stderr)

    pythons: dict[str, Path | str] = {OPWEAVE: Path(sys.executable)}
    planned = groups(options.rows, options.threads, options.engines)
    used = {comparison.peer for group in planned for comparison in group.comparisons}
    for engine in filter(used.__contains__, ENVIRONMENTS):
        try:
            pythons[engine] = install(engine, note)
        except WorkerError as error:
            pythons[engine] = str(error)
    rows = []
    models = Models(options.size, note)
    for group in planned:
        with progress(quiet=options.json) as bar:
            for row in measure(group, models, pythons, options.rounds, bar):
                rows.append(row)
                if not options.json:
                    out.print(report.line(row), markup=False)
    return rows


def save(rows: list[dict[str, Any]], machine: dict[str, Any], command: str) -> None:
    files = {
        RESULTS / "peers.json": as_json(machine, rows=rows),
        RESULTS / "peers.md": report.markdown(rows, machine, command),
        PICTURE: report.draw(rows, machine),
    }
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run(main)

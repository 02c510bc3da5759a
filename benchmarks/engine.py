"""How fast the engine is: many requests at once, and one alone.

    python benchmarks/engine.py                    a table
    python benchmarks/engine.py --json             one object, see below
    python benchmarks/engine.py --plot engine.svg  a picture, too
    python benchmarks/engine.py --size tiny        small models, to try it: the figures mean little
    python benchmarks/engine.py --llama-cpp build/llama-cpp/bin/python      with llama.cpp, too

Everything that is compared runs in turns in one process, on one thread unless ``--threads`` says
otherwise, and a figure is the median over rounds. `ratio` above 1: ours is better.

``engine.throughput``: tokens generated in a second by ``LLM.generate`` from a load of requests that
arrive at once; baseline: transformers' continuous batching, with the same budget of tokens.
``engine.throughput.generate``: the same; baseline: ``generate`` of transformers, one padded batch.
`equal_answers` of `answers` are token for token those of the baseline, in float32.
``engine.structured_output``: the throughput of such a load with a JSON schema for every answer;
baseline: without.
``engine.latency.first_token.p50`` and so on: from handing a request in, in milliseconds.
``engine.decode_bandwidth``: tokens in a second of one request; `limit`: those that reading the
weights at the measured speed of memory would allow; baseline: a loop over transformers' model.
``engine.decode_bandwidth.int8``, ``.fp8``: linear layers have weights of 8 bits; the head has not.
``engine.prefill``: tokens of a prompt of 512 in a second.
``engine.decode_bandwidth.llama_cpp``, ``engine.prefill.llama_cpp``: the same; baseline: llama.cpp
with the same weights and its own defaults, in a process of its own. The file for it takes 2.5 GB in
the folder for temporary files.
``engine.low_bit.decode.w4a16``, ``.q4_0``, ``.q4_k``: decoding with weights of four bits: groups of
64, and GGUF files of these formats, whose head is q6_k; baseline: bfloat16. ``engine.low_bit.
prefill``: a prompt of 512. ``….llama_cpp``: baseline: llama.cpp with the same file; for w4a16, with
that of q4_0. Without ``--llama-cpp`` a line says how it is installed: into an
environment of its own, where it is compiled in ten minutes or so (200 MB).
``engine.host.batch64`` and so on: microseconds of a decode step besides the model's forward and LM
head; ``….streaming``: with an output after every token.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from rich.table import Table

from engine_cells import host, low_bit, mixed, plot, single, structured
from engine_cells.llama_cpp_contender import HOW_TO_GET, check_python
from engine_cells.models import MIXED
from harness import Parser, WorkerError, describe_machine, out, print_json, run

PARTS = ("mixed", "structured", "single", "low-bit", "host")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture, as SVG")
    parser.add_argument("--size", choices=list(MIXED), default="full", help="of the models")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--requests", type=int, default=32, help="of the mixed load")
    parser.add_argument("--steps", type=int, default=16, help="tokens that one request decodes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--llama-cpp",
        metavar="PYTHON",
        default=os.environ.get("LLAMA_CPP_PYTHON") or None,
        help="that has it, to compare with it (default: $LLAMA_CPP_PYTHON)",
    )
    options = parser.parse_args(arguments)
    for name in ("requests", "steps", "rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.plot is not None and not options.plot.parent.is_dir():
        parser.error(f"--plot {options.plot}: no directory {options.plot.parent}")
    if options.llama_cpp is not None:
        try:
            check_python(options.llama_cpp)
        except WorkerError as error:
            parser.error(f"--llama-cpp: {error}")
    elif {"single", "low-bit"} & {*options.parts}:
        print(HOW_TO_GET, file=sys.stderr)
    torch.set_num_threads(options.threads)
    found = []
    if "mixed" in options.parts:
        found += mixed.measure(options.size, options.requests, options.rounds, quiet=options.json)
    if "structured" in options.parts:
        found += structured.measure(
            options.size, options.requests, options.rounds, quiet=options.json
        )
    for part, module in (("single", single), ("low-bit", low_bit)):
        if part in options.parts:
            found += module.measure(
                options.size,
                options.steps,
                options.rounds,
                llama_cpp=options.llama_cpp,
                quiet=options.json,
            )
    if "host" in options.parts:
        found += host.measure(options.rounds, quiet=options.json)
    machine = describe_machine()
    if options.plot is not None:
        options.plot.write_text(plot.draw(found, machine), encoding="utf-8")
    if options.json:
        print_json(machine, found)
        return 0
    table = Table("name", "value", "unit", "baseline", "against", "ratio", "of the limit", "equal")
    for row in found:
        share = f"{row['limit_share']:.0%}" if "limit_share" in row else ""
        equal = f"{row['equal_answers']} of {row['answers']}" if "answers" in row else ""
        fields = ("name", "value", "unit", "baseline", "against", "ratio")
        table.add_row(*(str(row.get(field, "")) for field in fields), share, equal)
    out.print(table)
    for case in dict.fromkeys(row["case"] for row in found):
        out.print(case, markup=False)
    return 0


if __name__ == "__main__":
    run(main)

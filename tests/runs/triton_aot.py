"""Compile the Triton kernels for GPUs that are not there, and print what they take.

    PYTHONPATH=build/triton python tests/runs/triton_aot.py            all kernels, 5 minutes
    ... tests/runs/triton_aot.py --only paged_attention --gpu sm_90
    ... tests/runs/triton_aot.py --update                              write the record of the tests

Each cell has registers, and spills after a slash: bytes of a thread on NVIDIA GPUs, registers on
AMD GPUs. The tests (make test-triton-aot) compare them with
compiled.json of packages/opweave/tests/triton_kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / path) for path in ("packages/opweave/src", "packages/opweave/tests")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return 0, or 1 if a kernel takes more than recorded."""
    parser = argparse.ArgumentParser(prog="triton_aot.py", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--only", default="", metavar="NAME", help="launches whose name begins so")
    add("--gpu", action="append", metavar="NAME", help="for these GPUs only, as sm_90 or gfx942")
    add("--update", action="store_true", help="write the record instead of comparing with it")
    add("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1: Triton interprets kernels; unset it to compile them")
    os.environ.setdefault("OPWEAVE_PLATFORM", "cpu")
    try:
        from triton_kernels.compiled import (
            GPUS,
            Table,
            launches,
            problems,
            read_record,
            usage,
            write_record,
        )
    except ImportError as error:
        parser.error(f"{error}. make test-triton installs Triton in build/triton.")
    gpus = options.gpu or list(GPUS)
    if unknown := [gpu for gpu in gpus if gpu not in GPUS]:
        parser.error(f"--gpu {unknown[0]!r}: known are {', '.join(GPUS)}")
    if options.update and (options.only or options.gpu):
        parser.error("--update writes the whole record: leave out --only and --gpu")
    table: Table = {}
    for gpu in gpus:
        for call in launches(GPUS[gpu]):
            if call.name.startswith(options.only):
                table.setdefault(call.name, {})[gpu] = usage(call, GPUS[gpu])
    if not table:
        parser.error(f"--only {options.only!r}: no launch has a name that begins so")
    if options.update:
        write_record(table)
    record = read_record()
    found = [
        problem
        for name, row in table.items()
        for gpu, used in row.items()
        for problem in problems(name, gpu, used, record)
    ]
    if options.json:
        rows = {name: {g: u._asdict() for g, u in row.items()} for name, row in table.items()}
        print(json.dumps({"rows": rows, "problems": found}))
    else:
        width = max(map(len, table))
        print(f"{'':{width}}", *(f"{gpu:>10}" for gpu in gpus))
        for name, row in sorted(table.items()):
            cells = [f"{row[g].registers}/{row[g].spills}" if g in row else "-" for g in gpus]
            print(f"{name:{width}}", *(f"{cell:>10}" for cell in cells))
        print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

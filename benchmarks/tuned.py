"""The engine with a tuning file against the engine without.

    opweave tune DIR -o tuning.json --load-format dummy    makes the file
    python benchmarks/tuned.py DIR tuning.json             a table
    python benchmarks/tuned.py DIR tuning.json --json      one object

DIR has a checkpoint, or only its config.json: the weights are random. Both engines have a process
of their own and run in turns. A figure is the median over rounds, and `ratio` the median of the
seconds without the file over those with it in the same round: above 1, tuning is faster.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from harness import (
    Parser,
    Worker,
    describe_machine,
    interleaved,
    out,
    print_json,
    progress,
    run,
    significant,
)
from opweave.config import CacheConfig, EngineConfig, SchedulerConfig
from opweave_engine import LLM, SamplingParams

# Requests, tokens of each prompt, and tokens of each answer.
WORKLOADS = {
    "decode/1": (1, 16, 32),
    "decode/8": (8, 16, 32),
    "prompt/128": (1, 128, 1),
    "prompt/512": (1, 512, 1),
}


def serve(path: str, dtype: str) -> None:
    """Read names of workloads from standard input, as JSON, and write the seconds of each."""
    config = EngineConfig(
        dtype=dtype,
        load_format="dummy",
        cache=CacheConfig(memory_bytes=256 << 20, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_batched_tokens=512),
    )
    llm = LLM(path, config=config, progress=False)
    torch.manual_seed(0)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        requests, length, new = WORKLOADS[json.loads(line)]
        prompts = torch.randint(llm.config.vocab_size, (requests, length)).tolist()
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params)
        print(time.perf_counter() - start, flush=True)


def started(path: Path, dtype: str, tuning_file: str) -> Worker:
    """Return an engine in a process of its own."""
    return Worker(
        [sys.executable, __file__, "--serve", str(path), dtype],
        {"OMP_NUM_THREADS": "1", **os.environ, "OPWEAVE_TUNING_FILE": tuning_file},
        f"the engine with OPWEAVE_TUNING_FILE={tuning_file!r}",
    )


def measure(
    path: Path, file: Path, dtype: str, rounds: int, *, quiet: bool
) -> list[dict[str, Any]]:
    """Return a row per workload."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    context = config.get("max_position_embeddings", 2048)
    rows = []
    with ExitStack() as stack:
        engines = {"untuned": "", "tuned": str(file.resolve())}
        contenders = {who: started(path, dtype, given) for who, given in engines.items()}
        for each in contenders.values():
            stack.callback(each.close)
        for name, (requests, prompt, answer) in WORKLOADS.items():
            if prompt + answer > context:
                continue
            tokens = requests * (answer if answer > 1 else prompt)
            measures = {
                who: lambda each=each, name=name: each.ask(name) for who, each in contenders.items()
            }
            for warm_up in measures.values():
                warm_up()
            with progress(quiet=quiet) as bar:
                times = interleaved(measures, bar.track(range(rounds), description=name))
            ratios = [a / b for a, b in zip(times["untuned"], times["tuned"], strict=True)]
            rows.append(
                {
                    "name": f"tuned.{name}",
                    "case": f"{path.name}, {dtype}",
                    "value": significant(tokens / statistics.median(times["tuned"])),
                    "unit": "tokens/s",
                    "baseline": significant(tokens / statistics.median(times["untuned"])),
                    "ratio": significant(statistics.median(ratios)),
                }
            )
    return rows


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return 0
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, metavar="DIR", help="a checkpoint, or its config.json")
    parser.add_argument("file", type=Path, metavar="FILE", help="the tuning file")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not (options.path / "config.json").is_file():
        parser.error(f"{options.path} has no config.json")
    if not options.file.is_file():
        parser.error(f"{options.file} is not a file; opweave tune makes it")
    rows = measure(options.path, options.file, options.dtype, options.rounds, quiet=options.json)
    if options.json:
        print_json(describe_machine(), rows)
        return 0
    table = Table("case", "tokens/s", "untuned", "ratio")
    for row in rows:
        table.add_row(row["name"], *(f"{row[key]:g}" for key in ("value", "baseline", "ratio")))
    out.print(table)
    return 0


if __name__ == "__main__":
    run(main)

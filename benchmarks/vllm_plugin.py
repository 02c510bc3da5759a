"""Throughput of an unpatched vLLM with opweave's kernels against vLLM alone.

    make test-vllm                                          makes the environment
    .venv-vllm/bin/python benchmarks/vllm_plugin.py         a table, for linear,attention
    .venv-vllm/bin/python benchmarks/vllm_plugin.py --json  one object
    ... --seams none linear linear,attention all            several choices of seams
    ... --size tiny --rounds 1                              to try it: the figures mean little

For each dtype and mode, vLLM runs in one process without the plugin's seams and in one for each
choice of seams. Their rounds are interleaved, on one thread unless OMP_NUM_THREADS says otherwise.
A figure is the median over rounds, and `ratio` the median of the seconds of vLLM alone over those
with the plugin in the same round. Random weights, random prompts, greedy tokens.

``vllm_plugin.throughput``: tokens generated in a second by 32 requests that arrive at once, and by
one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from harness import Parser, Worker, describe_machine, out, print_json, run, significant

WORKER = Path(__file__).parent / "peer_cells" / "workers" / "vllm_worker.py"
SIZES: dict[str, dict[str, int]] = {
    # The Llama of the figures that the defaults come from.
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    },
}
ALONE = "none"
DEFAULT = "linear,attention"


def started(seams: str, options: dict[str, Any], cache: str) -> Worker:
    """Return a process with vLLM and a choice of seams."""
    env = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": cache,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OPWEAVE_VLLM_SEAMS": seams,
    }
    command = [sys.executable, str(WORKER), json.dumps(options)]
    return Worker(command, env, f"vLLM with OPWEAVE_VLLM_SEAMS={seams}")


def checkpoint(folder: Path, size: str) -> str:
    """Write the configuration of a Llama."""
    shape = {**SIZES[size], "max_position_embeddings": 4096}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def measure(
    options: dict[str, Any],
    dtype: str,
    mode: str,
    *,
    seams: list[str],
    prompts: list[list[int]],
    tokens: int,
    counts: list[int],
    rounds: int,
    cache: str,
) -> list[dict[str, Any]]:
    """Return the rows for one dtype and mode; *tokens* answer each of the *prompts*."""
    options = {**options, "dtype": dtype, "eager": mode == "eager"}
    with ExitStack() as stack:
        engines = []
        for each in [ALONE, *seams]:
            engines.append(started(each, options, cache))
            stack.callback(engines[-1].close)
        rows = []
        for count in counts:
            load = {"prompts": prompts[:count], "counts": [tokens] * count}
            for engine in engines:
                engine.ask(load)  # a first round compiles, and fills caches
            taken: list[list[float]] = [[] for _ in engines]
            for i in range(rounds):
                order = range(len(engines)) if i % 2 == 0 else reversed(range(len(engines)))
                for j in order:
                    taken[j].append(engines[j].ask(load)["seconds"])
            shared = f"{dtype}, {mode}, {count} requests"
            for each, times in zip(seams, taken[1:], strict=True):
                ratio = statistics.median(a / b for a, b in zip(taken[0], times, strict=True))
                rows.append(
                    {
                        "name": "vllm_plugin.throughput",
                        "case": f"{shared}, {each}",
                        "value": significant(count * tokens / statistics.median(times)),
                        "unit": "tokens/s",
                        "baseline": significant(count * tokens / statistics.median(taken[0])),
                        "ratio": significant(ratio),
                    }
                )
    return rows


def main() -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument(
        "--seams", nargs="+", default=[DEFAULT], help="values of OPWEAVE_VLLM_SEAMS"
    )
    parser.add_argument("--requests", nargs="+", type=int, default=[32, 1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--json", action="store_true", help="print one object")
    args = parser.parse_args()
    rows = []
    length, tokens = (128, 64) if args.size == "small" else (16, 8)
    torch.manual_seed(0)
    shape = (max(args.requests), length)
    prompts = torch.randint(10, SIZES[args.size]["vocab_size"], shape).tolist()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "model": checkpoint(Path(folder), args.size),
            "dummy": True,
            "context": length + tokens,
            "requests": max(args.requests),
            "batch": max(512, length),
        }
        for dtype in args.dtypes:
            for mode in args.modes:
                rows += measure(
                    options,
                    dtype,
                    mode,
                    seams=args.seams,
                    prompts=prompts,
                    tokens=tokens,
                    counts=args.requests,
                    rounds=args.rounds,
                    cache=folder,
                )
    if args.json:
        print_json(describe_machine(), rows)
        return 0
    table = Table("case", "tokens/s", "vLLM alone", "ratio")
    for row in rows:
        table.add_row(row["case"], *(str(row[key]) for key in ("value", "baseline", "ratio")))
    out.print(table)
    return 0


if __name__ == "__main__":
    run(main)

"""Serve a tiny model of every causal architecture of transformers, and compare the answers.

    python tests/runs/families                       # all of them: a few minutes
    python tests/runs/families --check optimize      # opweave.optimize: a few minutes
    python tests/runs/families --check compile       # backend="opweave": an hour
    python tests/runs/families --only gemma3 mamba   # some
    python tests/runs/families --json > families.json

Each architecture gets a model with random weights. transformers continues prompts of 1, 9, 70 and
300 tokens greedily, without a cache; the engine must give the same tokens and log-probabilities,
for each prompt alone and for all of them together. With "optimize" and "compile", the logits of
transformers' own model are compared before and after. The exit status is 1 if any differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

from runs.families.architectures import names
from runs.families.compare import Result, compare
from runs.families.isolated import compare_all
from runs.families.models import compile_model, optimize


def row(result: Result, width: int) -> str:
    """Return a result as one line, with the name in *width* characters."""
    line = f"{result.name:<{width}}  {result.ran:<10}  {result.seconds:4.1f} s  {result.status}"
    return f"{line}: {result.detail}" if result.detail else line


def summary(results: Sequence[Result]) -> str:
    """Return how many results have each status, and how the equal ones ran."""
    ways = Counter(result.ran for result in results if result.status == "equal" and result.ran)
    statuses = Counter(result.status for result in results)
    return "\n".join(
        ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        for counts in (statuses, ways)
        if counts
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="architectures to compare")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at the same time")
    parser.add_argument("--check", default="engine", choices=["engine", "optimize", "compile"])
    parser.add_argument(
        "--codegen", action="store_true", help="compile with Inductor's code: hours for all"
    )
    parser.add_argument("--model-impl", default="auto", choices=["auto", "opweave", "transformers"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    chosen = given.only or names()
    if unknown := set(chosen) - set(names()):
        parser.error(f"unknown architectures: {', '.join(sorted(unknown))}")
    comparison, cpu_seconds = {
        "engine": (partial(compare, model_impl=given.model_impl), 120),
        "optimize": (optimize, 120),
        "compile": (partial(compile_model, codegen=given.codegen), 600),
    }[given.check]
    results, width = [], max(map(len, chosen))
    for number, found in enumerate(compare_all(chosen, comparison, given.jobs, cpu_seconds), 1):
        results += found
        if given.json:
            print(f"\r{number} of {len(chosen)}", end="", file=sys.stderr, flush=True)
        else:
            print(*(row(result, width) for result in found), sep="\n", flush=True)
    if given.json:
        print(file=sys.stderr)
        print(json.dumps({"rows": [asdict(result) for result in results]}))
    else:
        print(summary(results))
    return 1 if any(result.status in ("different", "failed") for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())

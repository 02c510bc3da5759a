"""The line protocol of the workers.

A worker runs in the environment of its engine. The first line on stdout is
``{"build": "vLLM 0.32.0"}``. Then each line on stdin is a load, ``{"prompts": [[3, 1], [2]],
"counts": [2, 1]}``, and each line on stdout its greedy answer, ``{"tokens": [[7, 9], [5]],
"seconds": 0.2}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import IO

Tokens = list[list[int]]


def take_stdout() -> IO[str]:
    """Return standard output for answers; the engine's own output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(answers: IO[str], build: str, generate: Callable[[Tokens, list[int]], Tokens]) -> None:
    """Answer the loads from standard input until it ends."""
    print(json.dumps({"build": build}), file=answers, flush=True)
    for line in sys.stdin:
        load = json.loads(line)
        start = time.perf_counter()
        tokens = generate(load["prompts"], load["counts"])
        seconds = time.perf_counter() - start
        if [len(each) for each in tokens] != load["counts"]:
            raise RuntimeError(f"{build} has generated another number of tokens than requested")
        print(json.dumps({"tokens": tokens, "seconds": seconds}), file=answers, flush=True)

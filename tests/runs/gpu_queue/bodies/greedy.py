"""Greedy tokens of small models of several families, on the device and on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gpu_queue.job import Row
from models import layer_checkpoints, tiny_checkpoints
from opweave.config import CacheConfig, EngineConfig
from opweave.config.child_process import inherited_environment
from opweave_engine import LLM, SamplingParams

FAMILIES = ("llama", "mixtral", "deepseek", "gemma3", "mamba2")
_PROMPTS = (3, 17, 40)  # tokens
_TOKENS = 32
_BLOCKS = 64


def write_checkpoint(path: Path, family: str) -> None:
    """Write a model of *family* with random weights."""
    module = tiny_checkpoints if family in tiny_checkpoints.KINDS else layer_checkpoints
    module.write_checkpoint(path, family)


def answers(path: Path, mode: int) -> list[list[int]]:
    """Return the tokens that the model writes after some prompts, on this process's platform."""
    config = EngineConfig(
        dtype="float32",
        compilation_config={"mode": mode},
        cache=CacheConfig(num_blocks=_BLOCKS),
    )
    llm = LLM(path, config=config)
    prompts = [tiny_checkpoints.random_ids(seed, count) for seed, count in enumerate(_PROMPTS)]
    params = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
    return [each.outputs[0].token_ids for each in llm.generate(prompts, params)]


def run(family: str, mode: int, device: str) -> Iterator[Row]:
    """Yield how many answers are those of the CPU, computed op by op in another process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / family
        write_checkpoint(path, family)
        expected = _on_the_cpu(path)
        found = answers(path, mode)
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    row: Row = {
        "name": "greedy",
        "case": f"{family}, {'compiled' if mode else 'op by op'}",
        "value": equal,
        "unit": f"of {len(expected)} answers equal",
    }
    if equal < len(expected):
        row["problem"] = "; ".join(
            f"prompt {index}: token {_first_difference(a, b)} of {len(b)} differs"
            for index, (a, b) in enumerate(zip(found, expected, strict=True))
            if a != b
        )
    yield row


def _first_difference(found: list[int], expected: list[int]) -> int:
    pairs = zip(found, expected, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))


def _on_the_cpu(path: Path) -> list[list[int]]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gpu_queue.bodies.greedy", path],
        env={**inherited_environment(), "OPWEAVE_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the answers of the CPU failed: {done.stderr}")
    expected: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return expected


if __name__ == "__main__":
    print(json.dumps(answers(Path(sys.argv[1]), 0)))

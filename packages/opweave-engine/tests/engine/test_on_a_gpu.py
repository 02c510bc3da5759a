"""A GPU writes what the CPU writes, op by op and compiled, for models of several families."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models import tiny_checkpoints
from opweave.config.child_process import inherited_environment
from support.devices import needs_cuda

pytestmark = needs_cuda

FAMILIES = ("llama", "mixtral", "deepseek", "gemma3", "mamba2")
PROGRAM = """
import json, sys
from opweave.config import CacheConfig, EngineConfig
from opweave_engine import LLM, SamplingParams

path, mode, prompts = json.loads(sys.argv[1])
config = EngineConfig(
    dtype="float32", compilation_config={"mode": mode}, cache=CacheConfig(num_blocks=64)
)
params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
outputs = LLM(path, config=config).generate(prompts, params)
print(json.dumps([output.outputs[0].token_ids for output in outputs]))
"""


def answers(path: Path, platform: str, mode: int) -> list[list[int]]:
    """Return the greedy tokens of the model after prompts of 3, 17 and 40 tokens."""
    prompts = [tiny_checkpoints.random_ids(seed, count) for seed, count in enumerate((3, 17, 40))]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([str(path), mode, prompts])],
        env={**os.environ, **inherited_environment(), "OPWEAVE_PLATFORM": platform},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers(family: str, tmp_path: Path) -> None:
    tiny_checkpoints.write_checkpoint(tmp_path / family, family)
    expected = answers(tmp_path / family, "cpu", 0)
    assert [len(answer) for answer in expected] == [32] * 3
    for mode in (0, 3):
        assert answers(tmp_path / family, "cuda", mode) == expected, mode

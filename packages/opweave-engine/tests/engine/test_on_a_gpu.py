"""A GPU writes what the CPU writes, op by op and compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from support import ROOT
from support.devices import needs_cuda

CHECKPOINT = ROOT / "examples" / "models" / "tiny-pydoc"
PROMPTS = ["Return a list of", "The name of the file", "If"]

pytestmark = needs_cuda


def answers(platform: str, *options: str) -> list[dict[str, Any]]:
    prompts = [f"--prompt={text}" for text in PROMPTS]
    command = [sys.executable, "-m", "opweave", "generate", CHECKPOINT, *prompts, "--json"]
    done = subprocess.run(
        [*command, "--dtype=float32", "--max-tokens=32", *options],
        env=os.environ | {"OPWEAVE_PLATFORM": platform},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["outputs"]
    return found


@pytest.mark.parametrize("mode", [0, 3])
def test_greedy_answers(mode: int) -> None:
    option = f"--compilation-config.mode={mode}"
    assert texts(answers("cuda", option)) == texts(answers("cpu", option))


def texts(found: list[dict[str, Any]]) -> list[str]:
    return [answer["text"] for answer in found]

"""The sanitizers notice what they are for, on every instruction set: ``make test-sanitizers``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from types import ModuleType

import pytest

from .conftest import ISAS

pytestmark = pytest.mark.skipif(
    os.environ.get("TEST_EXPECT_SANITIZERS") != "1", reason="only for make test-sanitizers"
)

# Makes each call in a child of its own, and prints what the child said when it died.
PROBE = """
import json, os, sys, tempfile, torch
from opweave import native

module, said = native.module(), []
for call in json.load(sys.stdin):
    with tempfile.TemporaryFile("w+") as file:
        if not (child := os.fork()):
            os.dup2(file.fileno(), 2)
            exec(f"module.{call}")
            os._exit(0)
        os.waitpid(child, 0)
        file.seek(0)
        said.append(file.read())
print(json.dumps(said))
"""


def reports(isa: str, calls: Sequence[str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBE],
        env={**os.environ, "OPWEAVE_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        input=json.dumps(calls),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    assert len(found) == len(calls)
    return found


@pytest.mark.parametrize("isa", ISAS)
def test_a_kernel_leaves_its_tensors(module: ModuleType, isa: str) -> None:
    """One element more than there are, read or written, by a tail and by a whole vector."""
    calls = []
    for dtype, width in product(("float32", "bfloat16", "float16"), (7, 64)):
        fits, short = (f"torch.zeros({n}, dtype=torch.{dtype})" for n in (width, width - 1))
        calls.append(f"misuse_width({fits}, {short}, {width})")
        calls.append(f"misuse_width({short}, {fits}, {width})")
    for call, said in zip(calls, reports(isa, calls), strict=True):
        # A vector that starts within the tensor and ends outside is an unknown crash to it.
        assert re.search("AddressSanitizer: (heap-buffer-overflow|unknown-crash)", said), call
        assert re.search(r"#\d .*/csrc/kernels/vec\w*\.h", said), (call, said)


def test_undefined_behavior(module: ModuleType) -> None:
    fine, bad = reports("base", [f"misuse_signed(torch.zeros(1), 2**63 - {n})" for n in (2, 1)])
    assert not fine
    assert "runtime error: signed integer overflow" in bad

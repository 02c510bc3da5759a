"""Provider ``vllm_c`` on the real wheel: make test-libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from opweave import ir
from opweave.conformance import CHECKS, Subject, subjects
from opweave.kernels.libraries import vllm_c
from support.adapter_certificates import verify_adapter

VLLM = subjects(providers=["vllm_c"])
SLOW = ("repetition",)


def test_the_library_is_there() -> None:
    assert vllm_c.library_path() is not None
    assert len(VLLM) == 13


@pytest.mark.adapter
@pytest.mark.parametrize("subject", VLLM, ids=str)
def test_implementations_are_right(subject: Subject) -> None:
    verify_adapter(subject, [name for name in CHECKS if name not in SLOW])


def test_it_runs_where_it_is_preferred() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    with ir.record() as record, ir.priority({"rms_norm": ["vllm_c"]}):
        ir.ops.rms_norm(x, weight, 1e-6)
    assert "vllm_c" in str(record)


def test_a_process_that_does_not_use_it_does_not_load_it() -> None:
    code = (
        "import torch; from opweave import ir; ir.ops.relu2(torch.ones(4));"
        "import sys; assert 'vllm' not in sys.modules;"
        "assert not any('vllm' in line for line in open('/proc/self/maps'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compiled_calls_run_it() -> None:
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    with ir.priority({"silu_and_mul": ["vllm_c"]}):
        eager = ir.ops.silu_and_mul(x)
        compiled = torch.compile(ir.ops.silu_and_mul, backend="opweave")(x)
    assert torch.equal(eager, compiled)

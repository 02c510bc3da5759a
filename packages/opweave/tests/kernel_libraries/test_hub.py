"""Kernel repositories of Hugging Face, with the real package ``kernels``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.conformance import Subject
from opweave.ir import rules
from opweave.kernels.wrap import HubKernel, Output, wrap
from support.adapter_certificates import verify_adapter

KERNEL = """
import torch

def silu_and_mul(out, x):
    first, second = x.chunk(2, dim=-1)
    torch.mul(torch.nn.functional.silu(first), second, out=out)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "gate" / "build" / "torch-cpu"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(KERNEL)
    about = {"name": "gate", "id": "_gate_1", "version": 1, "license": "Apache-2.0"}
    (folder / "metadata.json").write_text(
        json.dumps({**about, "python-depends": [], "backend": {"type": "cpu"}})
    )
    return tmp_path / "gate"


def half_of(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def inputs(
    num_tokens: int = 8, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor]:
    return (torch.randn(num_tokens, 64, device=device).to(dtype),)


@pytest.mark.adapter
def test_a_local_repository_runs(repository: Path) -> None:
    x = torch.randn(3, 64)
    with ir.isolated_registry():
        op = ir.register_op(ir.ops.silu_and_mul.native)
        op.register_input_generator(inputs)
        kernel = HubKernel(repository, "silu_and_mul")
        wrap(op, "hub", kernel, [Output(half_of), "x"], supports_args=rules.cpu("x"))
        call = op.using("hub!")
        torch.testing.assert_close(call(x), op.native(x))
        torch.testing.assert_close(torch.compile(call, backend="opweave")(x), op.native(x))
        verify_adapter(Subject(op, "hub"), ["values", "layouts", "empty"])


def test_a_folder_that_is_not_there_is_the_reason(tmp_path: Path) -> None:
    with ir.isolated_registry():
        op = ir.register_op(ir.ops.silu_and_mul.native)
        wrap(op, "hub", HubKernel(tmp_path / "nowhere", "f"), [Output(half_of), "x"])
        assert op.impls["hub"].unsupported_reason.endswith("nowhere is not a folder")


def test_a_repository_that_is_not_locked_is_refused(tmp_path: Path) -> None:
    lockfile = tmp_path / "kernels.lock"
    lockfile.write_text("[]")
    with pytest.raises(ValueError, match="acme/gate"):
        HubKernel("acme/gate", "silu_and_mul", lockfile=lockfile).load()

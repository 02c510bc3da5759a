"""The torch ops are graph-safe."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from opweave import _custom_ops

from . import oracle
from .oracle import assert_near, random


@pytest.mark.parametrize("weight", [None, torch.ones(8)], ids=["no weight", "weight"])
@pytest.mark.parametrize("op", ["rms_norm", "fused_add_rms_norm"])
def test_opcheck(module: ModuleType, op: str, weight: Tensor | None) -> None:
    arguments = (torch.randn(3, 8), torch.randn(3, 8), weight, 1e-6)
    torch.library.opcheck(getattr(torch.ops.opweave_c, op).default, arguments)


def test_fullgraph(module: ModuleType) -> None:
    def normalize(x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.opweave_c.rms_norm(out, x * 2, weight, 1e-6)
        return out + 1

    x, weight = random(5, 24, dtype=torch.float32), torch.ones(24)
    compiled = torch.compile(normalize, fullgraph=True, backend="aot_eager")
    assert_near(compiled(x, weight) - 1, oracle.rms_norm(x * 2, weight, 1e-6))


def test_wrappers_in_a_full_graph(module: ModuleType) -> None:
    def step(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = x + 0, residual + 0
        _custom_ops.fused_add_rms_norm(x, residual, None, 1e-6)
        return x, residual

    x, residual = random(5, 24, dtype=torch.float32), random(5, 24, dtype=torch.float32, seed=3)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x, residual)
    for mine, wanted in zip(got, oracle.fused_add_rms_norm(x, residual, None, 1e-6), strict=True):
        assert_near(mine, wanted)

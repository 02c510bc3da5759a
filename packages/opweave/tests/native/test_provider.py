"""The provider opweave_c: the IR ops by native kernels, with native's shapes and strides."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.kernels.opweave_c import norm

from .oracle import DTYPES, assert_near, random, weight_for


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    wide = random(3, 4, 60, dtype=dtype)
    return {
        "contiguous": random(3, 4, 37, dtype=dtype),
        "one row": random(1, 64, dtype=dtype),
        "vector": random(64, dtype=dtype),
        "slice": wide[..., :37],
        "transposed": wide.transpose(0, 1),
        "transposed slice": wide.transpose(0, 1)[..., 5:40],
        "steps": wide[:, ::2, :37],
        "expanded": wide[:1].expand(3, 4, 60),
        "empty": wide[:0],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", layouts(torch.float32))
@pytest.mark.parametrize("weight_kind", ["none", "same", "float32"])
def test_rms_norm_is_the_op(
    module: ModuleType, dtype: torch.dtype, layout: str, weight_kind: str
) -> None:
    x = layouts(dtype)[layout]
    weight = weight_for(weight_kind, x.shape[-1], dtype)
    native = ir.ops.rms_norm.impls["native"].impl_fn(x, weight, 1e-6)
    implementation = ir.ops.rms_norm.impls["opweave_c"]
    got = implementation.impl_fn(x, weight, 1e-6)
    assert_near(got, native)
    assert got.stride() == native.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_add_rms_norm_is_the_op(module: ModuleType, dtype: torch.dtype) -> None:
    weight = weight_for("same", 37, dtype)
    x, residual = random(3, 4, 37, dtype=dtype), random(3, 4, 37, dtype=dtype, seed=5)
    wanted = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, 1e-6)
    got = norm.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert got[0] is x
    assert got[1] is residual
    for mine, native in zip(got, wanted, strict=True):
        assert_near(mine, native)


def chosen(*arguments: object) -> str:
    with ir.priority(rms_norm=["opweave_c"]):
        return ir.ops.rms_norm.dispatch(*arguments).provider


def test_selection(module: ModuleType) -> None:
    x = torch.ones(2, 8)
    assert chosen(x, torch.ones(8), 1e-6) == "opweave_c"
    assert chosen(x, None, 1e-6) == "opweave_c"
    assert chosen(x, torch.ones(1), 1e-6) == "native"
    assert chosen(x, torch.ones(1).expand(8), 1e-6) == "native"
    assert chosen(x, torch.ones(8, dtype=torch.float64), 1e-6) == "native"
    assert chosen(x.double(), None, 1e-6) == "native"
    assert chosen(x.t(), None, 1e-6) == "native"
    assert chosen(x, None, 1e-6, 4) == "native"
    assert chosen(x.view(*[1] * 6, 2, 8), None, 1e-6) == "opweave_c"
    assert chosen(x.view(*[1] * 7, 2, 8), None, 1e-6) == "native"
    rank_nine = x.view(*[1] * 7, 2, 8)
    found = ir.ops.fused_add_rms_norm.using("opweave_c")(rank_nine, rank_nine.clone(), None, 1e-6)
    assert found[0].shape == rank_nine.shape


def test_fake_tensors_take_the_graph_path(module: ModuleType) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 8))
        assert norm.rms_norm(x, None, 1e-6).shape == (2, 8)


def test_compiles_in_one_graph(module: ModuleType) -> None:
    x = random(3, 24, dtype=torch.bfloat16)
    weight = weight_for("same", 24, torch.bfloat16)
    compiled = torch.compile(norm.rms_norm, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight, 1e-6), norm.rms_norm(x, weight, 1e-6))

"""DTensor arguments: row-wise ops keep the sharding of their rows, others raise one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from opweave import ir
from opweave.ir.errors import DTensorError
from opweave.ir.rules import ROWWISE

RANKS = 2
ROW_WISE = [
    op
    for op in ir.current_registry().ops.values()
    if ROWWISE in op.impls["native"].traits and op.has_input_generator
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this process is the first; the other one exists in name only."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def distributed(op: ir.IrOp, values: tuple[Any, ...], mesh: DeviceMesh) -> list[Any]:
    """Shard the tensors with a row for each token, and replicate the others."""
    tokens = values[0].shape[:-1]
    placements = [
        Shard(0) if isinstance(v, torch.Tensor) and v.shape[:-1] == tokens else Replicate()
        for v in values
    ]
    return [
        DTensor.from_local(v, mesh, [p], run_check=False) if isinstance(v, torch.Tensor) else v
        for v, p in zip(values, placements, strict=True)
    ]


@pytest.mark.parametrize("op", ROW_WISE, ids=lambda op: op.name)
def test_a_row_wise_op_runs_on_each_shard(op: ir.IrOp, mesh: DeviceMesh) -> None:
    values = op.bind(*op.generate_inputs())
    args, kwargs = op.schema.split(values)
    expected = op(*args, **kwargs)
    args, kwargs = op.schema.split(tuple(distributed(op, values, mesh)))
    found = op(*args, **kwargs)
    pairs = zip(
        found if isinstance(found, tuple) else (found,),
        expected if isinstance(expected, tuple) else (expected,),
        strict=True,
    )
    for output, right in pairs:
        assert output.placements == (Shard(0),)
        assert output.shape[0] == RANKS * right.shape[0]
        torch.testing.assert_close(output.to_local(), right, atol=0, rtol=0)


@pytest.mark.parametrize("inference", [False, True])
def test_every_way_to_call(mesh: DeviceMesh, inference: bool) -> None:
    op, local, w = ir.ops.fused_add_rms_norm, torch.randn(4, 8), torch.ones(8)
    expected = op(local, local * 2, w, 1e-6)
    with torch.inference_mode(inference):
        x, r = (DTensor.from_local(t, mesh, [Shard(0)]) for t in (local, local * 2))
        weight = DTensor.from_local(w, mesh, [Replicate()])
        for call in (op, op.maybe_inplace, op.using("native")):
            for output, right in zip(call(x, r, weight, 1e-6), expected, strict=True):
                assert output.placements == (Shard(0),)
                torch.testing.assert_close(output.to_local(), right)


def test_compiled(mesh: DeviceMesh) -> None:
    local = torch.randn(4, 8)
    x = DTensor.from_local(local, mesh, [Shard(0)])

    def program(x: torch.Tensor) -> torch.Tensor:
        return ir.ops.silu_and_mul(x) * 2

    compiled: Any = torch.compile(program, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x).to_local(), program(local))


def test_an_op_that_is_not_row_wise(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.randn(4, 8), mesh, [Shard(0)])
    w = DTensor.from_local(torch.randn(8, 8), mesh, [Replicate()])
    with pytest.raises(DTensorError, match="linear has no sharding strategy for DTensor") as error:
        ir.ops.linear(x, w)
    assert "\n" not in str(error.value)
    with torch.enable_grad():  # native runs, in operators that torch has strategies for
        w.requires_grad_()
        assert ir.ops.linear(x, w).shape == (4 * RANKS, 8)

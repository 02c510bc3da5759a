"""Every kernel against its op's native implementation, by opweave's conformance kit."""

from __future__ import annotations

import acme_device
import pytest
import torch
from acme_device.kernels.floats import FLOATS
from acme_device.ops import TILE, acme_tiled_linear, tile
from acme_device.platform import AcmePlatform
from torch import Tensor

from opweave import ir
from opweave.conformance import verify
from opweave.conformance.subject import Subject

OPS = sorted(AcmePlatform().get_default_ir_op_priority())
QUICK = ("options", "none", "empty", "mutation", "donation")  # the slow test runs all


def subject(name: str) -> Subject:
    return Subject(ir.current_registry().op(name), "acme", "acme")


def test_the_platform_prefers_every_kernel() -> None:
    ops = ir.current_registry().ops.values()
    assert sorted(op.name for op in ops if "acme" in op.impls) == OPS


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OPS)
def test_computes_what_native_does_and_on_the_device(name: str, dtype: torch.dtype) -> None:
    op = subject(name).op
    values = op.generate_inputs(dtype=dtype)
    moved = [v.to("acme") if isinstance(v, Tensor) else v for v in values]
    acme_device.reset_fallbacks()
    assert op.dispatch(*moved).provider == "acme"
    found, expected = op(*moved), op.native(*values)
    assert acme_device.fallbacks() == {}
    pairs = zip(found, expected, strict=True) if op.schema.returns_tuple else [(found, expected)]
    for one, other in pairs:
        assert one.device == torch.device("acme", 0)
        atol, rtol = op.get_tolerance(one.dtype)
        torch.testing.assert_close(one.cpu(), other, atol=atol, rtol=rtol)


@pytest.mark.parametrize("name", OPS)
def test_conforms(name: str) -> None:
    result = verify(subject(name), QUICK)
    result.raise_if_failed()
    assert result.passed


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_conforms_in_everything(name: str) -> None:
    result = verify(subject(name))
    result.raise_if_failed()
    assert result.passed


@pytest.mark.parametrize("rows", [1, TILE - 1, TILE, 2 * TILE + 3])
def test_tiles(rows: int) -> None:
    weight = torch.randn(rows, 5)
    tiles = tile(weight)
    assert tiles.shape == (-(-rows // TILE), 5, TILE)
    assert tiles[(rows - 1) // TILE, :, (rows - 1) % TILE].tolist() == weight[-1].tolist()
    x = torch.randn(3, 5)
    assert torch.allclose(acme_tiled_linear(x, tiles, rows), x @ weight.T, atol=1e-6)


def test_kernels_refuse_what_would_read_beyond_memory() -> None:
    positions = torch.tensor([0, 99]).to("acme")
    query = torch.zeros(2, 1, 4, device="acme")
    table = torch.zeros(8, 4, device="acme")
    with pytest.raises(IndexError, match="position 99 is not in the table of 8"):
        torch.ops.acme.rotary_embedding_(query, query.clone(), positions, table, True)
    ids = torch.tensor([-1]).to("acme")
    with pytest.raises(IndexError, match="id -1 is not in the vocabulary"):
        torch.ops.acme.embedding(ids, torch.zeros(2, 3, device="acme"))
    beyond = torch.zeros(4, device="acme")
    beyond = torch.empty(0, device="acme").set_(beyond.untyped_storage(), 0, (4,), (1,))
    beyond.untyped_storage().resize_(4)
    with pytest.raises(RuntimeError, match="x reaches beyond its memory"):
        torch.ops.acme.silu_and_mul(beyond)
    with pytest.raises(RuntimeError, match="on cpu"):
        torch.ops.acme.linear(torch.zeros(1, 2, device="acme"), torch.zeros(2, 2), None)

"""QuantFP8: the op that it calls, its table of shapes, and its options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from layers.switch import both_ways, built
from opweave import ir
from opweave.layers import GroupShape, LayerArgumentError, QuantFP8
from opweave.layers.quant_fp8 import PER_CHANNEL, PER_TENSOR, PER_TOKEN

FP8 = torch.float8_e4m3fn
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def check(q: Tensor, scale: Tensor, x: Tensor, by_element: Tensor) -> None:
    """Assert that ``q * scale`` is *x*, but for rounding, where it does not overflow."""
    assert (q.dtype, q.shape, scale.dtype) == (FP8, x.shape, torch.float32)
    wide, by = x.double(), by_element.double()
    error = (wide - q.double() * by).abs()
    bound = torch.maximum(wide.abs() * 2**-4, by * 2**-10)
    assert (error <= bound * 1.001)[wide.abs() <= 448 * by].all()


OPS: dict[tuple[int, int], tuple[ir.IrOp, tuple[Any, ...]]] = {
    PER_TENSOR: (ir.ops.dynamic_per_tensor_quant_fp8, ()),
    PER_TOKEN: (ir.ops.dynamic_per_token_quant_fp8, ()),
    (1, 64): (ir.ops.per_token_group_quant_fp8, (64, False)),
    (1, 8): (ir.ops.per_token_group_quant_fp8, (8, False)),
}


@both_ways
@each_dtype
@pytest.mark.parametrize("shape", OPS, ids=str)
def test_computed_scales(shape: tuple[int, int], dtype: torch.dtype, custom_ops: str) -> None:
    op, arguments = OPS[shape]
    layer = built(custom_ops, lambda: QuantFP8(False, shape))
    wide = torch.randn(7, 1028).to(dtype)
    for x in (wide[:, :1025], wide[:1, :17], wide.view(1, 2, 7, 514), wide[:0]):
        (q, scale), (wanted, wanted_scale) = layer(x), op.native(x, *arguments)
        torch.testing.assert_close(scale, wanted_scale, atol=0, rtol=1e-6)
        width = -(-x.shape[-1] // scale.shape[-1]) if shape == PER_TOKEN else shape[1]
        by_element = (
            scale.expand(x.shape)
            if shape == PER_TENSOR
            else (scale.repeat_interleave(width, -1)[..., : x.shape[-1]])
        )
        check(q, scale, x, by_element)
        different = q.view(torch.uint8) != wanted.view(torch.uint8)
        assert different.sum() <= 2 + 0.002 * different.numel()  # kernels may round to a neighbor


@both_ways
def test_options_of_computed_scales(custom_ops: str) -> None:
    x = torch.randn(5, 64) * 100
    layer = built(custom_ops, lambda: QuantFP8(False, (1, -1)))
    _, scale = layer(x, scale_ub=torch.tensor([30.0]))
    wanted = x.abs().amax(-1, keepdim=True).clamp(max=30.0) / 448
    torch.testing.assert_close(scale, wanted)
    _, scale = built(custom_ops, lambda: QuantFP8(False, (1, 8), use_ue8m0=True))(x)
    assert torch.equal(scale.frexp().mantissa, torch.full(scale.shape, 0.5))  # powers of two


# Given scales

ROWS, COLUMNS = 8, 48


@pytest.mark.parametrize("shape", [PER_TENSOR, PER_TOKEN, GroupShape(1, 16)], ids=str)
def test_graphs_know_what_shares_a_scale(shape: GroupShape) -> None:
    layer = QuantFP8(False, shape)
    x = torch.randn(4, 32)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for found, expected in zip(compiled(x), layer(x), strict=True):
        assert torch.equal(found.float(), expected.float())


STATIC: list[tuple[GroupShape, tuple[int, ...], tuple[int, ...]]] = [
    (PER_TENSOR, (1,), (1,)),
    (PER_TENSOR, (), ()),
    (PER_TENSOR, (1, 1), (1, 1)),
    (PER_TOKEN, (ROWS,), (ROWS, 1)),
    (PER_TOKEN, (ROWS, 1), (ROWS, 1)),
    (PER_TOKEN, (1,), (1, 1)),
    (PER_CHANNEL, (COLUMNS,), (1, COLUMNS)),
    (PER_CHANNEL, (1, COLUMNS), (1, COLUMNS)),
    (GroupShape(1, 16), (ROWS, 3), (ROWS, 3)),
    (GroupShape(4, 16), (2, 3), (2, 3)),
    (GroupShape(4, 48), (2,), (2, 1)),
    (GroupShape(8, 48), (1,), (1, 1)),
]


@both_ways
@each_dtype
@pytest.mark.parametrize(("shape", "given", "returned"), STATIC, ids=str)
def test_given_scales(
    shape: GroupShape,
    given: tuple[int, ...],
    returned: tuple[int, ...],
    dtype: torch.dtype,
    custom_ops: str,
) -> None:
    x, scale = torch.randn(ROWS, COLUMNS).to(dtype), torch.rand(given) * 0.01 + 0.004
    q, back = built(custom_ops, lambda: QuantFP8(True, shape))(x, scale)
    assert back.shape == returned
    assert torch.equal(back.flatten(), scale.flatten())
    blocks = back.reshape(1, 1) if back.ndim < 2 else back
    rows, columns = ROWS // blocks.shape[0], COLUMNS // blocks.shape[1]
    by_element = blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    check(q, back, x, by_element)


def test_a_square_is_not_ambiguous() -> None:
    x, scale = torch.randn(4, 4), torch.rand(4) + 0.5
    by_token, _ = QuantFP8(True, PER_TOKEN)(x, scale)
    by_channel, _ = QuantFP8(True, PER_CHANNEL)(x, scale)
    assert torch.equal(by_token.float(), (x / scale[:, None]).to(FP8).float())
    assert torch.equal(by_channel.float(), (x / scale).to(FP8).float())


# Options


@both_ways
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_scales_by_column(tokens: int, custom_ops: str) -> None:
    x = torch.randn(tokens, 64)
    q, scale = QuantFP8(False, (1, 16))(x)
    layer = built(custom_ops, lambda: QuantFP8(False, (1, 16), column_major_scales=True))
    same_q, same = layer(x)
    assert same.stride() == (1, tokens)
    aligned = built(custom_ops, lambda: QuantFP8(False, (1, 16), tma_aligned_scales=True))
    _, also = aligned(x)
    assert also.stride() == (1, -(-tokens // 4) * 4)
    assert torch.equal(same, scale)
    assert torch.equal(also, scale)
    assert torch.equal(same_q.float(), q.float())


@both_ways
@pytest.mark.parametrize("shape", [PER_TENSOR, PER_TOKEN, GroupShape(1, 16)], ids=str)
def test_padding_with_tokens(shape: GroupShape, custom_ops: str) -> None:
    x = torch.randn(5, 32)
    q, scale = QuantFP8(False, shape)(x)
    for wanted, rows in ((17, 17), (5, 5), (3, 5)):
        layer = built(custom_ops, partial(QuantFP8, False, shape, wanted))
        padded, same = layer(x)
        assert padded.shape == (rows, 32)
        assert torch.equal(padded[:5].float(), q.float())
        assert not padded[5:].float().any()
        assert torch.equal(same, scale)


def test_triton_is_a_preference() -> None:
    x = torch.randn(5, 32)
    layer = QuantFP8(False, (1, 16))
    for found, expected in zip(layer(x, use_triton=True), layer(x), strict=True):
        assert torch.equal(found.float(), expected.float())


def call(static: bool, shape: tuple[int, int], *arguments: Any, **options: Any) -> Any:
    return lambda: QuantFP8(static, shape, **options)(*arguments)


X = torch.randn(4, 32)


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (call(False, (-1, 1)), r"\(-1, 1\) needs given scales"),
        (call(False, (4, 16)), "needs given scales"),
        (call(True, (0, 16)), "positive"),
        (call(False, (1, -2)), "positive"),
        (call(False, (1, -1), use_ue8m0=True), "use_ue8m0"),
        (call(True, (-1, -1), column_major_scales=True), "column_major_scales"),
        (call(True, (-1, -1), X), "scale is missing"),
        (call(False, (1, -1), X, torch.ones(1)), "scale is given"),
        (call(False, (1, 16), X, torch.ones(1)), "scale is given"),
        (call(False, (-1, -1), X, None, torch.ones(1)), "scale_ub"),
        (call(True, (1, -1), X, torch.ones(1), torch.ones(1)), "scale_ub"),
        (call(True, (1, -1), X, torch.ones(5)), r"\(5,\).*\(4, 1\)"),
        (call(True, (1, 16), X, torch.ones(4, 3)), r"\(4, 3\).*\(4, 2\)"),
        (call(True, (1, 16), X, torch.ones(8)), r"\(8,\).*\(4, 2\)"),
        (call(True, (3, 16), X, torch.ones(1, 2)), "do not divide"),
        (call(False, (1, -1), X[None], num_token_padding=9), "matrices"),
    ],
)
def test_mistakes(run: Callable[[], Any], match: str) -> None:
    with pytest.raises(LayerArgumentError, match=match):
        run()


def test_an_upper_bound_is_one_number() -> None:
    with pytest.raises(ValueError, match="must have one element"):
        QuantFP8(False, PER_TOKEN)(X, scale_ub=torch.ones(4))


def test_properties_of_group_shapes() -> None:
    assert PER_TENSOR.is_per_tensor
    assert PER_TOKEN.is_per_token
    assert PER_CHANNEL.is_per_channel
    assert GroupShape(1, 128).is_per_group
    assert not GroupShape(128, 128).is_per_group

"""QuantFP8 against float64, element by element; its table of shapes, and its options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layers.switch import both_ways, built
from native.quant_oracle import fp8_codes
from opweave.layers import GroupShape, LayerArgumentError, QuantFP8
from opweave.layers.quant_fp8 import PER_CHANNEL, PER_TENSOR, PER_TOKEN

FP8 = torch.float8_e4m3fn
FLOOR = 1 / (448 * 512)
SIZES = (17, 1024, 1025, 1026, 5137, 8193)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def check(q: Tensor, scale: Tensor, x: Tensor, by_element: Tensor, divides: bool = False) -> None:
    """Compare codes, of which a kernel may round a few to a neighbor; and the way back.

    The definition multiplies by the reciprocal in float32, and for groups divides: where ties are
    frequent, as with 16 bits, that matters.
    """
    assert (q.dtype, q.shape) == (FP8, x.shape)
    assert scale.dtype is torch.float32
    wide, by = x.double(), by_element.double()
    exact = (wide / by if divides else wide * (1 / by).float().double()).float().double()
    exact = exact.clamp(-448, 448)
    codes = torch.from_numpy(fp8_codes(exact.numpy()))
    found = q.contiguous().view(torch.uint8).long()
    different = found != codes
    assert different.float().mean() < 0.002 if different.numel() > 1000 else different.sum() <= 2
    error = (x.double() - q.double() * by_element).abs()
    bound = torch.maximum(x.double().abs() * 2**-4, by_element.double() * 2**-10)
    inside = x.double().abs() <= 448 * by_element.double()
    assert (error <= bound * 1.001)[inside].all()


def largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True).double()


def scale_of(magnitude: Tensor) -> Tensor:
    return (magnitude.double() / 448).clamp(min=FLOOR).float()


@both_ways
@each_dtype
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [1, 7])
def test_computed_per_token_and_per_tensor(
    size: int, tokens: int, dtype: torch.dtype, custom_ops: str
) -> None:
    x = torch.randn(tokens, size + 3).to(dtype)[:, :size]  # rows of something wider
    q, scale = built(custom_ops, lambda: QuantFP8(False, PER_TOKEN))(x)
    torch.testing.assert_close(scale, scale_of(largest(x)), atol=0, rtol=1e-6)
    check(q, scale, x, scale)
    q, scale = built(custom_ops, lambda: QuantFP8(False, PER_TENSOR))(x)
    torch.testing.assert_close(scale, scale_of(x.abs().amax()).reshape(1), atol=0, rtol=1e-6)
    check(q, scale, x, scale.expand(x.shape))


@pytest.mark.slow
@both_ways
@each_dtype
@pytest.mark.parametrize("size", SIZES)
def test_many_tokens(size: int, dtype: torch.dtype, custom_ops: str) -> None:
    x, some = torch.randn(4096, size).to(dtype), torch.randperm(4096)[:64]
    q, scale = built(custom_ops, lambda: QuantFP8(False, PER_TOKEN))(x)
    torch.testing.assert_close(scale, scale_of(largest(x)), atol=0, rtol=1e-6)
    check(q[some], scale[some], x[some], scale[some])
    q, scale = built(custom_ops, lambda: QuantFP8(False, PER_TENSOR))(x)
    torch.testing.assert_close(scale, scale_of(x.abs().amax()).reshape(1), atol=0, rtol=1e-6)
    check(q[some], scale, x[some], scale.expand(64, size))


@both_ways
def test_an_upper_bound(custom_ops: str) -> None:
    x = torch.randn(5, 64) * 100
    layer = built(custom_ops, lambda: QuantFP8(False, (1, -1)))
    q, scale = layer(x, scale_ub=torch.tensor([30.0]))
    torch.testing.assert_close(scale, scale_of(largest(x).clamp(max=30.0)))
    check(q, scale, x, scale)


@both_ways
@each_dtype
@pytest.mark.parametrize(
    ("shape", "group"),
    [((7, 1024), 128), ((8, 513), 64), ((3, 17), 32), ((2, 3, 96), 32), ((1, 2, 3, 40), 16)],
    ids=str,
)
def test_computed_per_group(
    shape: tuple[int, ...], group: int, dtype: torch.dtype, custom_ops: str
) -> None:
    x = torch.randn(shape).to(dtype)
    layer = built(custom_ops, lambda: QuantFP8(False, GroupShape(1, group)))
    q, scale = layer(x)
    groups = -(-shape[-1] // group)
    assert scale.shape == (*shape[:-1], groups)
    by_element = scale.repeat_interleave(group, -1)[..., : shape[-1]]
    parts = [largest(part) for part in torch.split(x, group, -1)]
    torch.testing.assert_close(scale, scale_of(torch.cat(parts, -1)), atol=0, rtol=1e-6)
    check(q, scale, x, by_element, divides=True)
    wide = torch.cat((x, x), -1)[..., : shape[-1]]
    for found, expected in zip(layer(wide), (q, scale), strict=True):
        assert torch.equal(found.float(), expected.float())


@both_ways
def test_powers_of_two_are_exact(custom_ops: str) -> None:
    """Scales one unit above a power of two go up to the next, and powers of two stay."""
    layer = built(custom_ops, lambda: QuantFP8(False, (1, 8), use_ue8m0=True))
    exponents = torch.arange(-15, 60)
    for nudge in (0, 1, -1):
        wanted = torch.ldexp(torch.ones(75), exponents)
        bits = (wanted.view(torch.int32) + nudge).view(torch.float32)
        x = torch.zeros(75, 8)
        x[:, 3] = bits * 448
        exact = np.ldexp(1.0, np.ceil(np.log2((x[:, 3] / 448).double().numpy())).astype(int))
        _, scale = layer(x)
        assert torch.equal(scale[:, 0].double(), torch.from_numpy(exact))
    _, scale = layer(torch.zeros(1, 8))
    assert scale.item() == 2.0**-17


@both_ways
def test_zeros_and_large_values(custom_ops: str) -> None:
    for shape in (PER_TENSOR, PER_TOKEN, GroupShape(1, 16)):
        layer = built(custom_ops, partial(QuantFP8, False, shape))
        q, scale = layer(torch.zeros(4, 32))
        assert (scale > 0).all()
        assert not q.float().any()
        q, scale = layer(torch.full((4, 32), 1000.0))
        assert (scale > 1).all()
        assert (q.float() == 448).all()
        q, scale = layer(torch.empty(0, 32))
        assert q.shape == (0, 32)
    bad = torch.zeros(2, 16)
    bad[1, 3] = float("nan")
    q, _ = built(custom_ops, lambda: QuantFP8(False, PER_TOKEN))(bad)
    assert q.float()[1, 3].isnan()
    assert not q.float()[0].any()


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

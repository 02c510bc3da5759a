"""Donation: ``maybe_inplace`` may reuse the activations, and a check mode shows who reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.errors import DonationError


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def op(registry: ir.Registry) -> ir.IrOp:
    """``(x + xr + w, xr + w)``, with kernels that reuse both activations, one, or none."""

    def shift(x: Tensor, xr: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x + xr + w, xr + w

    found = ir.register_op(allow_inplace=True)(shift)

    @found.register_impl("both", inplace=True)
    def _(x, xr, w):
        xr.add_(w)
        return x.add_(xr), xr

    @found.register_impl("second", inplace=True)
    def _(x, xr, w):
        xr.add_(w)
        return x + xr, xr

    return found


def args() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)


def donating(op: ir.IrOp, provider: str, way: str) -> Callable[..., Any]:
    if way == "using":
        return op.using(provider).maybe_inplace
    op.set_default([provider])
    return {"maybe_inplace": op.maybe_inplace, "torch op": op.torch_ops.maybe_inplace}[way]


@pytest.mark.parametrize("way", ["maybe_inplace", "using"])
@pytest.mark.parametrize("style", ["positional", "keyword", "mixed"])
@pytest.mark.parametrize(
    ("provider", "reused"), [("native", set()), ("second", {1}), ("both", {0, 1})]
)
def test_kernels_reuse_what_is_given_up(
    op: ir.IrOp, provider: str, reused: set[int], way: str, style: str
) -> None:
    call = donating(op, provider, way)
    for _ in range(3):
        x, xr, w = args()
        expected = op.native(x, xr, w)
        if style == "positional":
            result = call(x, xr, w)
        elif style == "keyword":
            result = call(w=w, xr=xr, x=x)
        else:
            result = call(x, w=w, xr=xr)
        assert {
            i
            for i, (r, t) in enumerate(zip(result, (x, xr), strict=True))
            if r.data_ptr() == t.data_ptr()
        } == reused
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("way", ["maybe_inplace", "using", "torch op"])
@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("provider", ["native", "second", "both"])
def test_no_wrong_gradient_from_what_is_given_up(
    op: ir.IrOp, provider: str, checks: bool, way: str
) -> None:
    """A backward pass that has saved a donated tensor gets its old values, or torch's error."""
    op.registry.settings.check_donation = checks
    call = donating(op, provider, way)
    for _ in range(3):
        x, xr, w = args()
        factor, needed = torch.ones(4, 6, requires_grad=True), x + xr
        with torch.enable_grad():
            product = factor * x + factor * xr
            result = call(x, xr, w)
            reused = any(r.data_ptr() in (x.data_ptr(), xr.data_ptr()) for r in result)
            assert reused is (provider != "native" and way != "torch op")
            if reused or (checks and way != "torch op"):
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    torch.autograd.grad(product.sum(), factor)
                continue
            (gradient,) = torch.autograd.grad(product.sum(), factor)
        assert torch.equal(gradient, needed)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_autograd_sees_what_a_native_kernel_writes(mode: Callable[[], Any]) -> None:
    norm = ir.ops.fused_add_rms_norm
    if "opweave_c" not in norm.supported_providers():
        pytest.skip("the native module is not built")
    x, xr = torch.randn(4, 8), torch.randn(4, 8)
    factor = torch.ones(4, 8, requires_grad=True)
    with torch.enable_grad():
        product = factor * x
    with mode(), ir.priority(fused_add_rms_norm=["opweave_c!"]):
        y, _ = norm.maybe_inplace(x, xr, None, 1e-5)
    assert y.data_ptr() == x.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward(torch.ones(4, 8))


def test_what_requires_a_gradient_is_not_reused(op: ir.IrOp) -> None:
    for i in range(3):
        given = list(args())
        given[i].requires_grad_()
        before = [t.clone() for t in given]
        with torch.enable_grad():
            op.using("both").maybe_inplace(*given)
        assert all(map(torch.equal, given, before))


@pytest.mark.parametrize("way", ["maybe_inplace", "using", "scope"])
@pytest.mark.parametrize("provider", ["native", "second", "both"])
@pytest.mark.parametrize(
    "view",
    [lambda x: x[:, 6:12], lambda x: x[:, ::3], lambda x: x.view(6, 12).t()[:4, :]],
    ids=["columns", "every third column", "transposed"],
)
def test_strides_are_those_of_the_functional_call(
    op: ir.IrOp, view: Callable[[Tensor], Tensor], provider: str, way: str
) -> None:
    call = donating(op, provider, way if way == "using" else "maybe_inplace")
    x, xr = view(torch.randn(4, 18)), view(torch.randn(4, 18))
    wanted = op.using(provider)(x.clone(), xr.clone(), torch.ones(6))
    with ir.priority() if way != "scope" else ir.priority(shift=[provider]):
        result = call(x, xr, torch.ones(6))
    torch.testing.assert_close(result, wanted)
    assert [t.stride() for t in result] == [t.stride() for t in wanted]
    assert not {t.data_ptr() for t in (x, xr)} & {t.data_ptr() for t in result}


def test_only_what_may_not_be_reused_is_copied(op: ir.IrOp) -> None:
    x, xr, w = torch.randn(4, 18)[:, :6], torch.randn(4, 6), torch.randn(6)
    before, expected = x.clone(), op.native(x, xr.clone(), w)
    y, s = op.using("both").maybe_inplace(x, xr, w)
    assert torch.equal(x, before)
    assert s.data_ptr() == xr.data_ptr()
    torch.testing.assert_close((y, s), expected)


def layouts() -> list[tuple[Tensor, Tensor, Tensor]]:
    same, w = torch.randn(4, 6), torch.randn(6)
    return [
        (same, same, w),
        (torch.randn(4, 6), torch.randn(6, 4).t(), w),
        (torch.randn(4, 12)[:, :6], torch.randn(4, 12)[:, ::2], w),
        (torch.randn(0, 6), torch.randn(0, 6), w),
    ]


def aliases() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Two views of one memory, an activation that is a weight too, rows that share memory."""
    same, memory, weight = torch.randn(4, 6), torch.randn(30), torch.randn(4, 6)
    return [
        (same, same.view(4, 6), torch.randn(6)),
        (memory[:24].view(4, 6), memory[6:].view(4, 6), torch.randn(6)),
        (torch.randn(4, 6), weight, weight),
        (torch.randn(1, 6).expand(4, 6), torch.randn(4, 6), torch.randn(6)),
    ]


@pytest.mark.parametrize("provider", ["native", "second", "both"])
@pytest.mark.parametrize("way", ["maybe_inplace", "using", "torch op"])
@pytest.mark.parametrize("make", [layouts, aliases])
def test_results_are_right_whatever_is_given_up(
    op: ir.IrOp, provider: str, way: str, make: Callable[[], list[tuple[Tensor, Tensor, Tensor]]]
) -> None:
    call = donating(op, provider, way)
    for x, xr, w in make():
        expected = op.native(x.clone(), xr.clone(), w.clone())
        torch.testing.assert_close(call(x, xr, w), expected)


def test_only_some_ops_can_be_given_activations() -> None:
    for name in ir.ops.__all__:
        op = getattr(ir.ops, name)
        if op.allow_inplace:
            assert callable(op.maybe_inplace)
            assert name in repr(op.maybe_inplace)
        else:
            with pytest.raises(DonationError, match=name):
                op.maybe_inplace  # noqa: B018
            with pytest.raises(DonationError, match=name):
                op.using("native").maybe_inplace  # noqa: B018


# Check mode


@pytest.fixture
def checked(op: ir.IrOp) -> ir.IrOp:
    op.registry.settings.check_donation = True
    return op


@pytest.mark.parametrize("way", ["maybe_inplace", "using", "scope", "record"])
@pytest.mark.parametrize(
    ("provider", "reused"), [("native", set()), ("second", {1}), ("both", {0, 1})]
)
def test_what_was_not_reused_becomes_nan(
    checked: ir.IrOp, provider: str, reused: set[int], way: str
) -> None:
    call = donating(
        checked, provider, way if way in ("maybe_inplace", "using") else "maybe_inplace"
    )
    for _ in range(2):
        x, xr, w = args()
        before, expected = w.clone(), checked.native(x, xr, w)
        if way == "scope":
            with ir.priority(shift=[provider]):
                result = call(x, xr, w)
        elif way == "record":
            with ir.record():
                result = call(x, xr, w)
        else:
            result = call(x, xr, w)
        torch.testing.assert_close(result, expected)
        for i, t in enumerate((x, xr)):
            assert bool(t.isnan().all()) is (i not in reused)
        assert torch.equal(w, before)


def test_the_default_overload_is_left_alone(checked: ir.IrOp) -> None:
    for provider in ("native", "both"):
        x, xr, w = args()
        before = [t.clone() for t in (x, xr, w)]
        checked.using(provider)(x, xr, w)
        assert all(map(torch.equal, (x, xr, w), before))


def test_check_mode_can_be_switched_off_again(checked: ir.IrOp) -> None:
    x, xr, w = args()
    checked.maybe_inplace(x, xr, w)
    assert x.isnan().all()
    checked.registry.settings.check_donation = False
    x, xr, w = args()
    checked.maybe_inplace(x, xr, w)
    assert not x.isnan().any()


def test_memory_that_is_still_in_use_is_left_alone(checked: ir.IrOp) -> None:
    memory = torch.randn(60)
    x, w = memory[:24].view(4, 6), memory[54:]
    before = memory.clone()
    checked.maybe_inplace(x, torch.randn(4, 6), w)  # x shares its storage with the weight
    assert torch.equal(memory, before)
    wide = torch.randn(4, 12)
    before = wide[:, 6:].clone()
    checked.maybe_inplace(wide[:, :6], torch.randn(4, 6), torch.randn(6))
    assert wide[:, :6].isnan().all()
    assert torch.equal(wide[:, 6:], before)  # only what was given up


def test_a_result_that_is_a_view_of_an_input_survives(registry: ir.Registry) -> None:
    def halves(x: Tensor) -> Tensor:
        return x + 1

    op = ir.register_op(allow_inplace=True)(halves)
    op.register_impl("alpha", inplace=True)(lambda x: x.add_(1).view(-1).view(x.shape))
    registry.settings.check_donation = True
    x = torch.zeros(2, 3)
    result = op.using("alpha").maybe_inplace(x)
    assert torch.equal(result, torch.ones(2, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(1, 6).expand(4, 6),
        lambda: torch.arange(9.0).as_strided((4, 6), (1, 1)),
        lambda: torch.nn.Parameter(torch.randn(4, 6)),
        lambda: torch.empty(0, 6).expand(0, 6),
    ],
    ids=["expanded", "overlapping", "parameter", "empty"],
)
def test_check_mode_takes_whatever_is_given_up(
    checked: ir.IrOp, make: Callable[[], Tensor]
) -> None:
    xs, w = (make(), make()), torch.randn(6)
    with torch.no_grad():
        expected = checked.native(*xs, w)
        torch.testing.assert_close(checked.maybe_inplace(*xs, w), expected)
        assert all(x.isnan().all() for x in xs)


def test_check_mode_takes_inference_tensors(checked: ir.IrOp) -> None:
    with torch.inference_mode():
        x, xr, w = args()
    expected = checked.native(x, xr, w)
    torch.testing.assert_close(checked.maybe_inplace(x, xr, w), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64], ids=str)
def test_check_mode_and_other_dtypes(registry: ir.Registry, dtype: torch.dtype) -> None:
    op = ir.register_op(name="copied", allow_inplace=True)(clone)
    registry.settings.check_donation = True
    x = torch.ones(3).to(dtype)
    assert torch.equal(op.maybe_inplace(x), torch.ones(3).to(dtype))
    if dtype is not torch.bool:
        assert not torch.equal(x, torch.ones(3).to(dtype))


def clone(x: Tensor) -> Tensor:
    return x.clone()


@torch.enable_grad()
def test_gradients_survive_check_mode(checked: ir.IrOp) -> None:
    leaf = torch.ones(4, 6, requires_grad=True)
    result, _ = checked.maybe_inplace(leaf * 2, leaf * 3, torch.ones(6))
    (gradient,) = torch.autograd.grad(result.sum(), leaf)
    assert torch.equal(gradient, torch.full((4, 6), 5.0))

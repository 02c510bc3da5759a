"""In-place kernels written in torch: operators in place, out= variants, views, and calls of ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import opweave.compile
from opweave import ir
from opweave.conformance import subjects, verify

from .conftest import compiled

ROWS, WIDTH = 6, 16
Kernel = Callable[[Tensor, Tensor], Tensor]


def chained(x: Tensor, by: Tensor) -> Tensor:
    return x.mul_(by).tanh_()


def unused_result(x: Tensor, by: Tensor) -> Tensor:
    x.mul_(by)
    x.tanh_()
    return x


def views(x: Tensor, by: Tensor) -> Tensor:
    first, second = x.mul_(by).chunk(2, -1)
    first.tanh_()
    second.transpose(0, 1).tanh_()
    return x


def foreach(x: Tensor, by: Tensor) -> Tensor:
    torch._foreach_mul_([x], [by])
    torch._foreach_tanh_([*x.mul_(1).split(2)])
    return x


def into_out(x: Tensor, by: Tensor) -> Tensor:
    scratch = torch.empty_like(x)
    torch.mul(x, by, out=scratch)
    torch.tanh(scratch, out=scratch)
    return x.copy_(scratch)


def sorted_out(x: Tensor, by: Tensor) -> Tensor:
    values = torch.empty_like(x)
    order = torch.empty(x.shape, dtype=torch.int64)
    found, places = torch.sort(x.mul_(by), -1, out=(values, order))
    return x.scatter_(-1, places, found).tanh_()


def scattered(x: Tensor, by: Tensor) -> Tensor:
    x.mul_(by).index_put_((torch.arange(len(x)),), x.clone())
    return x.index_copy_(0, torch.arange(len(x)), x.clone()).tanh_()


def transposed_in_place(x: Tensor, by: Tensor) -> Tensor:
    x.mul_(by).t_()  # changes the sizes of x itself: stays one opaque call
    return x.tanh_().t()


def clamped_view(x: Tensor, by: Tensor) -> Tensor:
    x.view(-1).mul_(by.reshape(-1))
    x.view(-1, 4).tanh_()
    x.unsqueeze(0).erfinv_().erf_()
    return x


def copied_input(x: Tensor, by: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x).mul_(by).tanh_()  # must not write to x


def indexed_between(x: Tensor, by: Tensor) -> Tensor:
    x.mul_(by)
    x.index_put_((torch.tensor([0]),), x[:1].clone())
    return x.tanh_()


def written_to_view_between(x: Tensor, by: Tensor) -> Tensor:
    x.mul_(by)
    x[:1].tanh_()
    return x.copy_(torch.cat([x[:1], x[1:].tanh()]))


def filled(x: Tensor, by: Tensor) -> Tensor:
    total = torch.empty_like(x).fill_(0.0)
    total.add_(x).mul_(by)
    total[:] += 0
    torch._foreach_copy_([x], [total])
    return x.tanh_()


KERNELS: list[Kernel] = [
    copied_input,
    indexed_between,
    written_to_view_between,
    filled,
    chained,
    unused_result,
    views,
    foreach,
    into_out,
    sorted_out,
    scattered,
    transposed_in_place,
    clamped_view,
]


@pytest.fixture
def acts() -> Iterator[ir.IrOp]:
    with ir.isolated_registry():

        @ir.register_op(allow_inplace=True)
        def acts(x: Tensor, by: Tensor) -> Tensor:
            return (x * by).tanh()

        yield acts


def several(op: Any, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Use an op where its input is new, read again later, and a view."""
    once = op(a.sin(), b)
    kept = a.cos()
    again = op(kept, b)
    half = op(kept[: ROWS // 2], b[: ROWS // 2])
    return once, again * once + again.exp(), kept.sin(), half, once.sin() * a, a + b[0]


def check(op: ir.IrOp, *providers: str, **how: Any) -> None:
    """Compare one graph that calls the kernels of all *providers* with native."""
    a, b = torch.rand(ROWS, WIDTH) + 0.5, torch.rand(ROWS, WIDTH)
    before = a.clone(), b.clone()
    expected = several(op.using("native"), a, b)

    def program(a: Tensor, b: Tensor) -> list[tuple[Tensor, ...]]:
        return [several(op.using(f"{provider}!"), a, b) for provider in providers]

    values = torch.compile(program, backend="opweave", fullgraph=True, **how)(a, b)
    for provider, results in zip(providers, values, strict=True):
        for value, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(value, reference, atol=1e-5, rtol=1e-5, msg=provider)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_operators_in_place(acts: ir.IrOp, kernel: Kernel) -> None:
    acts.register_impl("mine", inplace=True)(kernel)
    check(acts, "mine", options={"codegen": False})


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_generated_code_of_operators_in_place(acts: ir.IrOp) -> None:
    for kernel in KERNELS:
        acts.register_impl(kernel.__name__, inplace=True)(kernel)
    check(acts, *(kernel.__name__ for kernel in KERNELS), dynamic=True)


def test_result_of_an_operator_in_place_is_its_argument(acts: ir.IrOp) -> None:
    acts.register_impl("mine", inplace=True)(chained)
    a, b = torch.rand(ROWS, WIDTH), torch.rand(ROWS, WIDTH)
    with ir.priority(acts="mine"):
        compiled(lambda a, b: acts(a.sin(), b))(a, b)
    last = [step for step in opweave.compile.report().passes if step.name == "lower in place"][-1]
    assert "return (sin,)" in last.after


@pytest.fixture
def calling() -> Iterator[ir.IrOp]:
    """An op whose in-place implementations, and their functional form, call other ops."""
    with ir.isolated_registry():

        @ir.register_op
        def scaled(x: Tensor, by: Tensor) -> Tensor:
            return x * by

        @scaled.register_impl("empty")
        def _(x: Tensor, by: Tensor) -> Tensor:
            return torch.empty_like(x).copy_(x).mul_(by)

        @ir.register_op(allow_inplace=True)
        def squashed(x: Tensor, shift: float = 0.0) -> Tensor:
            return x.tanh() + shift

        @squashed.register_impl("inplace", inplace=True)
        def _(x: Tensor, shift: float = 0.0) -> Tensor:
            return x.tanh_().add_(shift)

        @ir.register_op(allow_inplace=True)
        def acts(x: Tensor, by: Tensor) -> Tensor:
            return (x * by).tanh()

        @acts.register_impl("copies", inplace=True)
        def _(x: Tensor, by: Tensor) -> Tensor:
            return x.copy_(scaled(x, by)).tanh_()

        @acts.register_impl("twice", inplace=True)
        def _(x: Tensor, by: Tensor) -> Tensor:
            x.copy_(scaled(x, by))
            kept = squashed(x, 1.0)  # x is read again below: not in its memory
            x.copy_(squashed(x))
            return x.add_(kept).sub_(squashed(x, 0.0) * 0 + kept)

        @acts.register_impl("gives_up", inplace=True)
        def _(x: Tensor, by: Tensor) -> Tensor:
            return x.copy_(squashed.maybe_inplace(scaled(x, by)))

        def functional(x: Tensor, by: Tensor) -> Tensor:
            return squashed(scaled(x, by))

        @acts.register_impl("two_forms", inplace=True, functional=functional)
        def _(x: Tensor, by: Tensor) -> Tensor:
            return x.mul_(by).copy_(squashed(x))

        scaled.set_default(["empty"])
        squashed.set_default(["inplace"])
        yield acts


CALLING = ["copies", "twice", "gives_up", "two_forms"]


@pytest.mark.parametrize("provider", CALLING)
def test_kernels_that_call_ops(calling: ir.IrOp, provider: str) -> None:
    check(calling, provider, options={"codegen": False})


@pytest.mark.timeout(300)
def test_generated_code_of_kernels_that_call_ops(calling: ir.IrOp) -> None:
    check(calling, *CALLING)


def test_kernel_that_calls_its_own_op(acts: ir.IrOp) -> None:
    @acts.register_impl("mine", inplace=True)
    def _(x: Tensor, by: Tensor) -> Tensor:
        return x.copy_(acts(x, by))

    a, b = torch.rand(ROWS, WIDTH), torch.rand(ROWS, WIDTH)
    with ir.priority(acts="mine"), pytest.raises(Exception, match="'mine' of acts"):
        compiled(lambda a, b: acts(a.sin(), b))(a, b)


@pytest.mark.timeout(300)
def test_verify_passes_a_kernel_that_calls_an_op() -> None:
    with ir.isolated_registry():

        @ir.register_op(allow_inplace=True)
        def acts(x: Tensor) -> Tensor:
            return x.tanh() * 2

        @ir.register_op
        def doubled(x: Tensor) -> Tensor:
            return x * 2

        @acts.register_input_generator
        def _(num_tokens: int = 4) -> tuple[Tensor, ...]:
            return (torch.randn(num_tokens, 8),)

        @acts.register_impl("mine", inplace=True)
        def _(x: Tensor) -> Tensor:
            return x.tanh_().copy_(doubled(x))

        [subject] = subjects(ops=["acts"], providers=["mine"])
        result = verify(subject)
        assert result.status == "passed", result


@pytest.fixture
def pair() -> Iterator[ir.IrOp]:
    """An op with two outputs, and in-place kernels that end in a write to one of them."""
    with ir.isolated_registry():

        @ir.register_op(allow_inplace=True, activations=["x", "r"])
        def pair(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
            return (x + r).tanh(), x + r

        @pair.register_impl("last_first", inplace=True)
        def _(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
            r.add_(x)
            x.copy_(r.tanh())
            return x, r

        @pair.register_impl("swapped", inplace=True)
        def _(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
            x.add_(r)
            r.copy_(x).tanh_()
            return r, x

        yield pair


def with_bits_changed(x: Tensor) -> Tensor:
    """Return a new tensor whose last bit was changed through a view with another dtype."""
    y = x * 2
    y.view(torch.int32).bitwise_xor_(1)
    return y


both_modes = pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.slow)])


@pytest.mark.timeout(300)
@both_modes
def test_unused_outputs_of_in_place_kernels(pair: ir.IrOp, dynamic: bool) -> None:
    def program(op: Any, a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = op(a.sin(), b.cos())[0]
        second = op(a @ w, b @ w)[1]
        third = op((a * 2)[:2], (b * 3)[2:4])[0].sin()
        fourth = op(with_bits_changed(a), b.exp())[1]
        fifth = op(with_bits_changed(b), b.exp())[0]
        return first, second * second, third, fourth, fifth, b + 1

    def both(*inputs: Tensor) -> list[tuple[Tensor, ...]]:
        return [program(pair.using(f"{name}!"), *inputs) for name in ("last_first", "swapped")]

    inputs = torch.rand(4, 8), torch.rand(4, 8), torch.rand(8, 8)
    expected = program(pair.using("native"), *inputs)
    for values in torch.compile(both, backend="opweave", dynamic=dynamic)(*inputs):
        for value, reference in zip(values, expected, strict=True):
            torch.testing.assert_close(value, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.timeout(300)
@both_modes
def test_rotation_of_what_was_changed_as_integers(dynamic: bool) -> None:
    positions, cache = torch.arange(4), torch.randn(8, 16)

    def program(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        rotate = ir.ops.rotary_embedding
        (first, _), (_, second) = (
            rotate(with_bits_changed(q), k * times, positions, cache, 16) for times in (2, 3)
        )
        normed = ir.ops.qk_norm_rope(
            with_bits_changed(q), k * 4, positions, cache, None, None, 1e-5, 16
        )
        return first.sin(), second.sin(), normed[0]

    inputs = torch.randn(4, 64), torch.randn(4, 32)
    run = torch.compile(program, backend="opweave", dynamic=dynamic)
    for value, reference in zip(run(*inputs), program(*inputs), strict=True):
        torch.testing.assert_close(value, reference, atol=1e-5, rtol=1e-5)

"""Transforms and gradients are right with any priority, or an error, but never silently wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ir.helpers import assert_equal, each_float_op, each_float_provider, inputs, op_of, tuple_of
from opweave import ir
from opweave.ir.errors import NoImplementationError, ProviderUnavailableError

# Transforms

BATCHED: dict[str, tuple[int | None, ...]] = {
    "fused_add_rms_norm": (0, 0, None, None, None),
    "gelu_and_mul": (0, None),
    "linear": (0, None, None),
    "rms_norm": (0, None, None, None),
    "rotary_embedding": (0, 0, None, None, None, None),
    "varlen_attention": (0, 0, 0, None, None, None, None, None, None),
}


@each_float_op
def test_vmap_gives_the_right_values_or_says_why_not(name: str) -> None:
    op = op_of(name)
    batch = [inputs(op) for _ in range(3)]
    dims = BATCHED[name]
    stacked = [
        torch.stack([b[i] for b in batch]) if d == 0 else batch[0][i] for i, d in enumerate(dims)
    ]
    singles = [
        [stacked[i][j] if d == 0 else stacked[i] for i, d in enumerate(dims)] for j in range(3)
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        for call in [
            op,
            op.using(op.supported_providers()[-1]),
            *([op.maybe_inplace] if op.allow_inplace else []),
        ]:
            try:
                found = tuple_of(torch.vmap(call, in_dims=dims)(*stacked))
            except (RuntimeError, ValueError) as error:
                if "vmap" not in str(error):
                    raise
                continue
            for j, single in enumerate(singles):
                expected = tuple_of(op.native(*single))
                for f, e in zip(found, expected, strict=True):
                    atol, rtol = op.get_tolerance(torch.float32)
                    torch.testing.assert_close(f[j], e, atol=atol, rtol=rtol)


def differentiable_places(op: ir.IrOp, values: tuple[Any, ...]) -> list[int]:
    return [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]


def loss(op: Callable[..., Any], values: tuple[Any, ...], weights: list[Tensor]) -> Tensor:
    results = tuple_of(op(*values))
    return torch.stack([(r * w).sum() for r, w in zip(results, weights, strict=True)]).sum()


@each_float_provider
@pytest.mark.parametrize("how", ["autograd", "func.grad", "torch op"])
def test_gradients_are_natives_whatever_the_priority(name: str, provider: str, how: str) -> None:
    op = op_of(name)
    values = inputs(op, grad=True, dtype=torch.float64)
    weights = [torch.randn_like(r) for r in tuple_of(op.native(*values))]
    leaves = [values[i] for i in differentiable_places(op, values)]
    expected = torch.autograd.grad(loss(op.native, values, weights), leaves)
    with ir.priority({name: [provider]}):
        if how == "func.grad":
            places = tuple(differentiable_places(op, values))
            plain = tuple(v.detach() if isinstance(v, Tensor) else v for v in values)
            found = torch.func.grad(lambda *v: loss(op, v, weights), argnums=places)(*plain)
        else:
            call = op.torch_op if how == "torch op" else op
            found = torch.autograd.grad(loss(call, values, weights), leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@each_float_op
def test_gradcheck(name: str) -> None:
    op = op_of(name)
    small: dict[str, Any] = {"num_tokens": 2, "dtype": torch.float64}
    has_heads = "attention" in name or "rotary" in name
    small |= {"num_heads": 2, "head_size": 4} if has_heads else {"hidden_size": 6}
    values = inputs(op, grad=True, **small)
    for i, v in enumerate(values):
        if (
            isinstance(v, Tensor)
            and v.dtype is torch.float64
            and name == "rotary_embedding"
            and i == 3
        ):
            v.requires_grad_(False)  # 64 cached rows, of which two are used
    assert torch.autograd.gradcheck(op, values)
    if op.allow_inplace:  # given up, but nothing may be lost
        assert torch.autograd.gradcheck(
            lambda *v: op.maybe_inplace(
                *[t * 1 if i in op.activation_indices else t for i, t in enumerate(v)]
            ),
            values,
        )


def test_second_derivatives() -> None:
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(ir.ops.rms_norm, (x, w, 1e-6))
    hessian = torch.func.hessian(lambda x: ir.ops.rms_norm(x, w.detach(), 1e-6).sum())
    expected = torch.func.hessian(lambda x: ir.ops.rms_norm.native(x, w.detach(), 1e-6).sum())
    torch.testing.assert_close(hessian(x.detach()), expected(x.detach()))


@pytest.mark.parametrize("how", ["func.jvp", "forward_ad", "torch op"])
@each_float_provider
def test_forward_derivatives_are_right_or_refused(name: str, provider: str, how: str) -> None:
    op = op_of(name)
    values = inputs(op, dtype=torch.float64)
    tangent = torch.randn_like(values[0])
    rest = values[1:]
    # By reverse mode, twice: the natives of composites call other ops.
    _, expected = torch.autograd.functional.jvp(
        lambda x: op.native(x, *rest), values[0], tangent, strict=False
    )
    call = {"torch op": op.torch_op}.get(how, op)
    with ir.priority({name: [provider]}):
        try:
            if how == "forward_ad":
                with torch.autograd.forward_ad.dual_level():
                    dual = torch.autograd.forward_ad.make_dual(values[0], tangent)
                    found: Any = tuple(
                        torch.autograd.forward_ad.unpack_dual(t).tangent
                        for t in tuple_of(call(dual, *rest))
                    )
            else:
                _, found = torch.func.jvp(lambda x: call(x, *rest), (values[0],), (tangent,))
        except (RuntimeError, NotImplementedError, ir.IrError):
            return  # refused, so that nothing is silently wrong
    for a, b in zip(tuple_of(found), tuple_of(expected), strict=True):
        # No tangent means zero.
        torch.testing.assert_close(torch.zeros_like(b) if a is None else a, b)


def declare_doubled() -> ir.IrOp:
    with ir.isolated_registry():

        @ir.register_op
        def doubled(x: Tensor) -> Tensor:
            return x * 2

    doubled.register_impl("kernel", traits=["batch_invariant"])(lambda x: x * 2 + 100)
    doubled.set_default(["kernel"])
    return doubled


def test_vmap_runs_native_and_explain_and_record_say_so() -> None:
    doubled, seen = declare_doubled(), []

    def call(x: Tensor) -> Tensor:
        seen.append(ir.explain(doubled, x))
        return doubled(x)

    with ir.record() as log, torch.no_grad():
        found = torch.vmap(call)(torch.ones(3, 2))
    assert torch.equal(found, torch.full((3, 2), 2.0))
    assert log.selected_impls == {"doubled": {"native": 1}}
    assert seen[0].chosen == "native"
    assert "vmap" in str(seen[0])
    torch.vmap(torch.vmap(call))(torch.ones(3, 2, 2))
    torch.func.grad(lambda x: torch.vmap(call)(x).sum())(torch.ones(3, 2))
    torch.vmap(torch.func.grad(lambda x: call(x).sum()))(torch.ones(3, 2))
    assert {each.chosen for each in seen} == {"native"}


def test_vmap_over_nothing_that_an_op_takes_leaves_the_choice_alone() -> None:
    doubled, kept, seen = declare_doubled(), torch.ones(2), []

    def call(x: Tensor) -> Tensor:
        seen.append(ir.explain(doubled, kept).chosen)
        return doubled(kept) + x

    found = torch.vmap(call)(torch.zeros(3, 2))
    assert seen == ["kernel"]
    assert torch.equal(found, torch.full((3, 2), 102.0))


def test_vmap_refuses_what_only_a_kernel_can_do() -> None:
    doubled, x = declare_doubled(), torch.ones(3, 2)
    for call in (doubled.using("kernel!"), lambda x: ir.explain(doubled.using("kernel!"), x)):
        with pytest.raises(ProviderUnavailableError, match=r"cannot be used: torch\.vmap"):
            torch.vmap(call)(x)
    lacking = pytest.raises(NoImplementationError, match=r"kernel: torch\.vmap.*native: is not")
    with ir.require("batch_invariant"), lacking:
        torch.vmap(doubled)(x)
    assert torch.equal(torch.vmap(doubled.using("kernel"))(x), x * 2)


def test_vmap_of_grad_and_grad_of_vmap() -> None:
    w, x = torch.randn(8), torch.randn(4, 3, 8)

    def total(x: Tensor) -> Tensor:
        return ir.ops.rms_norm(x, w, 1e-6).square().sum()

    def native(x: Tensor) -> Tensor:
        return ir.ops.rms_norm.native(x, w, 1e-6).square().sum()

    torch.testing.assert_close(
        torch.vmap(torch.func.grad(total))(x), torch.vmap(torch.func.grad(native))(x)
    )
    torch.testing.assert_close(
        torch.func.grad(lambda x: torch.vmap(total)(x).sum())(x), torch.func.grad(native)(x)
    )


# Opaque kernels and gradients


@pytest.fixture
def opaque(registry: ir.Registry) -> ir.IrOp:
    """An op with a kernel that autograd cannot see through."""

    def doubled(x: Tensor, scale: float = 2.0) -> Tensor:
        return x * scale

    op = ir.register_op(doubled)

    @op.register_impl("blind")
    def _(x, scale=2.0):
        out = torch.empty_like(x)
        out.numpy()[...] = x.detach().numpy() * scale
        return out

    op.set_default(["blind"])
    return op


def test_an_opaque_kernel_is_passed_over_where_gradients_are_needed(opaque: ir.IrOp) -> None:
    x = torch.randn(3, requires_grad=True)
    for call in (
        opaque,
        opaque.torch_op,
        opaque.using("blind"),
        torch.compile(opaque, backend="eager"),
    ):
        (found,) = torch.autograd.grad(call(x, 3.0).sum(), x)
        assert_equal(found, torch.full((3,), 3.0))
    assert opaque.dispatch(x.detach()).provider == "blind"
    strict = opaque.using("blind!")
    with torch.no_grad():
        assert_equal(strict(x), x * 2)
    with pytest.raises(ProviderUnavailableError, match="gradient"):
        strict(x)
    with ir.priority(doubled="blind!"), pytest.raises(ProviderUnavailableError, match="gradient"):
        opaque.torch_op(x)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "jacrev", "jacfwd", "functionalize"])
def test_an_opaque_kernel_under_transforms(opaque: ir.IrOp, transform: str) -> None:
    x = torch.randn(3)
    for call in (opaque, opaque.torch_op, opaque.using("blind")):
        if transform == "grad":
            found = torch.func.grad(lambda x: call(x).sum())(x)  # noqa: B023
            expected = torch.full((3,), 2.0)
        elif transform == "vmap":
            found, expected = torch.vmap(call)(x), x * 2
        elif transform == "jvp":
            _, found = torch.func.jvp(call, (x,), (torch.ones(3),))
            expected = torch.full((3,), 2.0)
        elif transform == "functionalize":
            found, expected = torch.func.functionalize(call)(x), x * 2
        else:
            found = getattr(torch.func, transform)(call)(x)
            expected = 2 * torch.eye(3)
        assert_equal(found, expected)


def test_checkpointing(opaque: ir.IrOp) -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(3, requires_grad=True)
    (found,) = torch.autograd.grad(checkpoint(opaque, x, use_reentrant=False).sum(), x)
    assert_equal(found, torch.full((3,), 2.0))

"""Typical mistakes of new users: each gives a right result or one clear error."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import errors

X, W = torch.randn(2, 8), torch.ones(8)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def test_a_call_site_explains_itself() -> None:
    site = ir.ops.rms_norm.using("aten")
    assert ir.explain(site, X, W, 1e-6).chosen == "aten"
    assert site.dispatch(X, W, 1e-6).provider == "aten"
    assert site.get_priority()[0] == "aten"
    assert "using('aten')" in repr(site)
    with ir.record() as record:
        site(X, W, 1e-6)
    assert record.selected_impls == {"rms_norm": {"aten": 1}}
    with pytest.raises(errors.ProviderRejectedError, match="aten"):
        ir.explain(ir.ops.rms_norm.using("aten!"), X, W, 1e-6, variance_size=2)


@pytest.mark.parametrize("provider", ["opweave_c", "aten", "native", "batch_invariant"])
def test_lazily_negated_tensors(provider: str) -> None:
    negated = torch._neg_view(X)
    with ir.priority(rms_norm=[provider], fused_add_rms_norm=["native"]):
        for x, w in ((negated, W), (X, torch._neg_view(W)), (negated, torch._neg_view(W))):
            expected = ir.ops.rms_norm.native(x, w, 1e-6)
            torch.testing.assert_close(ir.ops.rms_norm(x, w, 1e-6), expected)


def test_zeros_without_memory() -> None:
    zeros = torch._efficientzerotensor(4, 8)
    with pytest.raises(RuntimeError, match="contiguous"):
        ir.ops.rms_norm(zeros, None, 1e-6)


@pytest.mark.parametrize("wrong", [X.numpy(), None, "x", [X], 3])
def test_what_is_no_tensor_is_named(wrong: object) -> None:
    with pytest.raises(errors.TensorArgumentError, match=r"rms_norm: x must be a Tensor, found"):
        ir.ops.rms_norm(wrong, W, 1e-6)


def test_a_missing_argument_is_reported_as_of_the_op() -> None:
    with pytest.raises(TypeError, match=r"^rms_norm\(\) missing"):
        ir.ops.rms_norm(X)


def test_sparse_tensors_are_passed_over() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about sparse tensors in general
        sparse = X.to_sparse_csr()
    explanation = {v.provider: v for v in _explain_or_none(sparse)}
    assert "strided" in explanation["opweave_c"].reason


def _explain_or_none(x: Tensor) -> tuple[Any, ...]:
    with ir.priority(rms_norm=["opweave_c", "native"]):
        return ir.explain(ir.ops.rms_norm, x, None, 1e-6).verdicts


async def later(x: Tensor) -> Tensor:
    return x


def items(x: Tensor) -> Any:
    yield x


@pytest.mark.parametrize("function", [later, items])
def test_functions_that_return_later(registry: ir.Registry, function: Callable[..., Any]) -> None:
    with pytest.raises(errors.InvalidOpError, match="async or generator"):
        ir.register_op(name="late")(function)

    @ir.register_op
    def prompt(x: Tensor) -> Tensor:
        return x + 0

    with pytest.raises(errors.SchemaMismatchError, match="async or generator"):
        prompt.register_impl("late")(function)


class Callable_:  # noqa: N801
    def __call__(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    "wrong", [Callable_(), functools.partial(torch.relu), "relu", torch.relu, ir.ops.rms_norm]
)
def test_an_op_is_declared_with_a_function(registry: ir.Registry, wrong: Any) -> None:
    with pytest.raises(errors.InvalidOpError, match="must be declared with a Python function"):
        ir.register_op(name="thing")(wrong)
    with pytest.raises(errors.InvalidOpError):
        ir.register_op(wrong)


def test_an_implementation_can_be_replaced(registry: ir.Registry) -> None:
    @ir.register_op
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_impl("mine")(lambda x: x + 1)
    with pytest.raises(errors.DuplicateImplError, match="override=True"):
        double.register_impl("mine")(lambda x: x + 2)
    double.set_default(["mine"])
    assert double(torch.zeros(1)).item() == 1
    double.register_impl("mine", override=True)(lambda x: x + 3)
    assert double(torch.zeros(1)).item() == 3
    with pytest.raises(errors.InvalidOpError, match="supported='no'"):
        double.register_impl("other", supported="no")(lambda x: x)  # type: ignore[arg-type]


@pytest.mark.parametrize("callee", ["rms_norm", torch.relu, None])
def test_only_ops_are_explained(callee: Any) -> None:
    with pytest.raises(errors.InvalidOpError, match=r"explain takes an op"):
        ir.explain(callee, X)


@pytest.mark.parametrize(
    "enter",
    [
        lambda: ir.priority(rms_norm=5),  # type: ignore[arg-type]
        lambda: ir.priority(["aten"]),  # type: ignore[arg-type]
    ],
)
def test_priorities_of_the_wrong_kind(enter: Callable[[], Any]) -> None:
    with pytest.raises(errors.SettingError, match="such as"), enter():
        pass
    with pytest.raises(errors.SettingError, match="not the name of a provider"):
        ir.ops.rms_norm.using(["aten"])  # type: ignore[arg-type]


def test_numpy_scalars_are_numbers() -> None:
    expected = ir.ops.rms_norm(X, W, 1e-6)
    torch.testing.assert_close(ir.ops.rms_norm(X, W, np.float64(1e-6)), expected)


def test_an_op_may_have_the_name_of_a_file_of_ops(fresh_python: Callable[..., Any]) -> None:
    """``from opweave.ir.ops import norm`` is the op then, not the module."""
    fresh_python("""
        import pkgutil
        import torch
        from opweave import ir

        names = {each.name for each in pkgutil.iter_modules(ir.ops.__path__)}
        free = sorted(names - ir.current_registry().ops.keys())
        assert "norm" in free
        for name in free:
            @ir.register_op(name=name)
            def declared(x: torch.Tensor) -> torch.Tensor:
                return x + 1
        x = torch.randn(2, 8)
        assert torch.equal(ir.ops.norm(x), x + 1)
        found = ir.ops.rms_norm(x, None, 1e-6)
        torch.testing.assert_close(found, ir.ops.rms_norm.native(x, None, 1e-6))
        import opweave_engine.llm, opweave_engine.models
    """)

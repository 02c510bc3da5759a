"""The IR by vLLM's names: what code and tests written for that one rely on."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from opweave import ir as own
from opweave_vllm.vllm_api import ir
from opweave_vllm.vllm_api.ir import op as module
from opweave_vllm.vllm_api.ir.op import RESERVED_PROVIDERS, IrOp, IrOpImpl, IrOpInplaceOverload

X, Y = torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])
ODD = torch.ones(1, 3)


@pytest.fixture
def blend(registry: own.Registry) -> IrOp:
    """An op with three implementations that can be told apart by what they add."""

    @ir.register_op(allow_inplace=True)
    def blend(x: Tensor, y: Tensor) -> Tensor:
        """Add two tensors.

        And nothing else.
        """
        return x + y

    @blend.register_impl("plus_ten")
    def _(x: Tensor, y: Tensor) -> Tensor:
        return x + y + 10

    @blend.register_impl("in_place", inplace=True)
    def _(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y).add_(20)

    @blend.register_impl("even", supports_args=lambda x, y: x.size(1) % 2 == 0)
    def _(x: Tensor, y: Tensor) -> Tensor:
        return x + y + 50

    return blend


def test_registry_and_identity(blend: IrOp, registry: own.Registry) -> None:
    assert IrOp.registry["blend"] is blend is ir.ops.blend
    assert blend.wrapped is registry.op("blend")
    assert list(IrOp.registry) == ["blend"]
    assert len(IrOp.registry) == 1
    assert blend.torch_op is getattr(torch.ops, module.vllm_ir_torch_lib.ns).blend.default
    assert isinstance(blend.maybe_inplace, IrOpInplaceOverload)
    assert (
        blend.maybe_inplace.torch_op is getattr(torch.ops, registry.namespace).blend.maybe_inplace
    )
    assert (blend.activations, blend.activation_indices, blend.allow_inplace) == (["x"], [0], True)
    assert "Tensor x" in blend._schema_str
    assert blend._schema_str.endswith("-> Tensor")
    assert repr(blend) == "IrOp('blend')"
    assert str(blend) == "IrOp('blend'): Add two tensors."


def test_ops_of_opweave_are_there() -> None:
    norm = ir.ops.rms_norm
    assert norm is IrOp.registry["rms_norm"] is ir.ops.rms_norm
    assert norm.wrapped is own.ops.rms_norm
    assert {"rms_norm", "fused_add_rms_norm", "gelu_and_mul_sparse"} <= set(dir(ir.ops))
    with pytest.raises(AttributeError, match="Did you mean 'rms_norm'"):
        _ = ir.ops.rms_nrom


def test_an_op_that_is_constructed_is_in_no_registry(registry: own.Registry) -> None:
    def twice(x: Tensor) -> Tensor:
        return x * 2

    first, second = IrOp("twice", twice), IrOp("twice", twice)
    assert "twice" not in IrOp.registry
    assert first(X).equal(second(X))
    assert first(X).equal(X * 2)
    assert str(first) == "IrOp('twice')"


def test_implementations(blend: IrOp) -> None:
    impl = blend.impls["even"]
    assert isinstance(impl, IrOpImpl)
    assert impl is blend.impls["even"]
    assert (impl.op, impl.provider, impl.supported, impl.inplace) == (blend, "even", True, False)
    assert not impl.supports_all_args
    assert blend.impls["plus_ten"].supports_all_args
    assert impl.supports_args(X, y=Y)
    assert not impl.supports_args(ODD, ODD)
    assert blend.impls["in_place"].inplace
    assert impl.impl_fn(X, Y).equal(X + Y + 50)
    assert len(impl.uuid()) == 64
    assert impl.uuid() != blend.impls["plus_ten"].uuid()
    assert blend.supported_providers() == ["native", "plus_ten", "in_place", "even"]


def test_a_registered_function_becomes_its_implementation(blend: IrOp) -> None:
    @blend.register_impl("late", supported=False)
    def late(x: Tensor, y: Tensor) -> Tensor:
        return x

    assert late is blend.impls["late"]
    assert "late" not in blend.supported_providers()


def test_registering_loads_nothing(blend: IrOp, registry: own.Registry) -> None:
    registry.on_first_use(lambda _: pytest.fail("a plugin's register() would load every kernel"))

    @blend.register_impl("early")
    def _(x: Tensor, y: Tensor) -> Tensor:
        return x

    assert "early" in blend.wrapped._impls


def test_stacks_end_at_the_users_decorator(blend: IrOp) -> None:
    assert "@ir.register_op(allow_inplace=True)" in blend._registration_stack[-1]
    assert __file__ in blend._registration_stack[-1]
    assert '@blend.register_impl("even"' in blend.impls["even"]._registration_stack[-1]


def refused(expected: type[Exception], match: str) -> pytest.RaisesExc[Exception]:
    return pytest.raises(expected, match=match)


def test_errors_are_both_kinds(blend: IrOp) -> None:
    def plus(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    for provider in RESERVED_PROVIDERS:
        with refused(AssertionError, "reserved"):
            blend.register_impl(provider)
    with refused(AssertionError, "registered already") as error:
        blend.register_impl("even")(plus)
    assert isinstance(error.value, own.IrError)
    assert isinstance(error.value, ValueError)
    with refused(AssertionError, "declared already"):
        ir.register_op(name="blend")(plus)
    with refused(AssertionError, "Did you mean 'even'"), blend.set_priority(["evne"]):
        pass
    with refused(AssertionError, r"unknown provider 'nobody' \(set_default\(...\)\)"):
        blend.set_default(["nobody"])
    with refused(ValueError, "does not match native schema"):
        blend.register_impl("other")(lambda x: x)
    with refused(ValueError, "supports_args"):
        blend.register_impl("other", supports_args=lambda x: True)(plus)
    with refused(RuntimeError, "No input generator"):
        blend.generate_inputs()
    with refused(ValueError, "No tolerance defined"):
        blend.get_tolerance(torch.complex64)
    assert set(blend.impls) == {"native", "plus_ten", "in_place", "even"}


@pytest.mark.parametrize(
    ("predicate", "match"),
    [
        (True, "must be a callable, not True"),
        (lambda x: True, r"number of parameters is 1; .* \['x', 'y'\]"),
        (lambda x, *, y: True, "keyword-only parameters"),
        (lambda x, z: True, "'z' does not match native parameter 'y'"),
        (lambda x, y=1: True, "y=1 does not match native default"),
    ],
)
def test_predicates_have_the_signature_of_the_op(blend: IrOp, predicate: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        blend.register_impl("other", supports_args=predicate)(lambda x, y: x)
    assert "other" not in blend.impls


def test_an_implementation_can_be_removed(blend: IrOp) -> None:
    blend.set_default(["even", "plus_ten"])
    assert blend(X, Y).equal(X + Y + 50)
    del blend.impls["even"]
    assert list(blend.impls) == ["native", "plus_ten", "in_place"]
    assert len(blend.impls) == 3
    blend.set_default(["plus_ten"])
    assert blend(X, Y).equal(X + Y + 10)
    for provider in ("even", "native"):
        with pytest.raises(KeyError, match=provider):
            del blend.impls[provider]


def test_opweaves_explain_takes_the_op(blend: IrOp) -> None:
    with blend.set_priority(["even", "plus_ten"]):
        assert own.explain(blend, ODD, ODD) == own.explain(blend.wrapped, ODD, ODD)
        assert own.explain(blend, ODD, ODD).chosen == "plus_ten"


def test_what_an_op_does_not_have(blend: IrOp) -> None:
    with pytest.raises(AttributeError, match="not declared with allow_inplace=True"):
        _ = ir.ops.relu2.maybe_inplace
    assert not hasattr(ir.ops.relu2, "maybe_inplace")
    with pytest.raises(AttributeError, match="'IrOp' object has no attribute 'implss'"):
        _ = blend.implss


def test_inputs_and_tolerances(blend: IrOp) -> None:
    assert not blend.has_input_generator

    @blend.register_input_generator
    def generate(n: int = 4) -> tuple[Tensor, Tensor]:
        return torch.ones(n, 3), torch.zeros(n, 3)

    assert blend.has_input_generator
    assert [tensor.shape for tensor in blend.generate_inputs(n=2)] == [(2, 3), (2, 3)]
    blend.override_tolerance(torch.float32, atol=0.1, rtol=0.2)
    assert blend.get_tolerance(torch.float32) == {"atol": 0.1, "rtol": 0.2}
    torch.testing.assert_close(X + 0.05, X, **blend.get_tolerance(torch.float32))


def test_fake(blend: IrOp) -> None:
    blend.register_fake(lambda x, y: x.new_empty(7))
    gm = make_fx(blend.torch_op, tracing_mode="fake")(X, Y)
    [node] = gm.graph.find_nodes(op="call_function", target=blend.torch_op)
    assert node.meta["val"].shape == (7,)


def test_priorities(blend: IrOp) -> None:
    assert blend.get_priority() == []
    with blend.set_priority(["even", "in_place", "plus_ten"]):
        assert blend.get_priority() == ["even", "in_place"]
        with blend.set_priority(["plus_ten"]):
            assert blend.get_priority() == ["plus_ten"]
            assert blend.dispatch(X, Y) is blend.impls["plus_ten"]
            assert blend(X, Y).equal(X + Y + 10)
        with blend.set_priority(["even"]):  # and not in_place: the inner list is complete
            assert blend.get_priority() == ["even", "native"]
        assert blend.dispatch(X, Y) is blend.impls["even"]
        assert blend.dispatch(ODD, ODD) is blend.impls["in_place"]
    assert blend.get_priority() == []
    blend.set_default(["plus_ten"])
    assert blend.get_priority() == ["plus_ten"]
    assert blend(X, Y).equal(X + Y + 10)
    assert blend.wrapped.dispatch(X, Y).provider == "plus_ten"


def test_what_cannot_run_is_left_out(blend: IrOp) -> None:
    @blend.register_impl("absent", supported=False)
    def _(x: Tensor, y: Tensor) -> Tensor:
        return x

    with blend.set_priority(["absent", "plus_ten"]):
        assert blend.get_priority() == ["plus_ten"]
        assert blend(X, Y).equal(X + Y + 10)


def test_warnings(blend: IrOp, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        blend.dispatch(X, Y)
        with blend.set_priority(["even"]):
            blend(X, Y)
        with blend.set_priority(["even", "native"]):
            blend(X, Y)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    unset, incomplete = (record.getMessage() for record in caplog.records)
    assert "fallback to native" in incomplete
    assert "blend" in unset
    assert "priority not set" in unset
    assert "blend" in incomplete
    assert "native may run" in incomplete


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_a_copy_is_the_op(again: Callable[[Any], Any]) -> None:
    assert again(ir.ops.rms_norm) is ir.ops.rms_norm
    assert again({"op": ir.ops.rms_norm})["op"] is ir.ops.rms_norm


def test_donation(blend: IrOp) -> None:
    x = X.clone()
    with blend.set_priority(["in_place"]), torch.no_grad():
        assert blend(x, Y).equal(X + Y + 20)
        assert x.equal(X)
        given = blend.maybe_inplace(x, Y)
    assert given.data_ptr() == x.data_ptr()
    assert given.equal(X + Y + 20)


@pytest.mark.parametrize("trace", [fx.symbolic_trace, lambda fn: make_fx(fn)(X, Y)])
@pytest.mark.parametrize("overload", ["default", "maybe_inplace"])
def test_torch_wrap(blend: IrOp, trace: object, overload: str) -> None:
    called = blend if overload == "default" else blend.maybe_inplace

    def calling(x: Tensor, y: Tensor) -> Tensor:
        return called(x, y)

    def nodes() -> list[fx.Node]:
        found: list[fx.Node] = trace(calling).graph.find_nodes(  # type: ignore[operator]
            op="call_function", target=called.torch_op
        )
        return found

    with ir.enable_torch_wrap(False):
        assert nodes() == []
        assert module._ENABLE_TORCH_WRAP is False
        with ir.enable_torch_wrap():
            assert len(nodes()) == 1
    with pytest.raises(KeyError), ir.enable_torch_wrap(False):
        raise KeyError
    assert len(nodes()) == 1
    assert module._ENABLE_TORCH_WRAP is True
    ir.set_default_torch_wrap(False)
    try:
        assert nodes() == []
    finally:
        ir.set_default_torch_wrap(True)


def test_without_torch_wrap_calls_mean_the_same(blend: IrOp) -> None:
    with ir.enable_torch_wrap(False), blend.set_priority(["in_place"]):
        x = X.clone()
        assert blend(x, y=Y).equal(X + Y + 20)
        assert x.equal(X)
        assert blend.maybe_inplace(x, x).equal(X + X + 20)
        assert x.equal(X)
        assert blend.maybe_inplace(x, Y).data_ptr() == x.data_ptr()
        leaf = X.clone().requires_grad_()
        blend.maybe_inplace(leaf, Y).sum().backward()
        assert leaf.grad.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("wrap", [True, False])
def test_compiled(blend: IrOp, wrap: bool) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def model(x: Tensor, y: Tensor) -> Tensor:
        return blend(x, y) * 2

    torch.compiler.reset()
    with ir.enable_torch_wrap(wrap):
        assert model(X, Y).equal((X + Y) * 2)

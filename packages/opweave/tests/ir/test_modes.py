"""Modes and subclasses see one call; modules that hold ops behave like any others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ir.helpers import assert_equal, each_op, inputs, op_of, tuple_of
from opweave import ir
from opweave.ir.errors import ProviderRejectedError, UnknownOpError
from opweave.ir.tolerance import Tolerance

# Modes and subclasses


class SeenByFunctionMode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class SeenByDispatchMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Watched(Tensor):
    seen: list[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture(params=["op", "using", "scope", "record"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    name = str(request.param)
    if name == "scope":
        with ir.priority(rms_norm=["native"], silu_and_mul=["native"]):
            yield name
    elif name == "record":
        with ir.record():
            yield name
    else:
        yield name


def called(op: ir.IrOp, way: str) -> tuple[Callable[..., Any], Any]:
    if way == "using":
        return op.using("native"), op.torch_ops.annotated
    return op, op.torch_op


@each_op
def test_modes_see_one_call(name: str, way: str) -> None:
    op = op_of(name)
    values = inputs(op)
    expected = op.native(*values)
    call, torch_op = called(op, way)
    call(*values)
    for mode in (SeenByFunctionMode(), SeenByDispatchMode()):
        with mode, torch.no_grad():
            result = call(*values)
        mine = [f for f in mode.seen if isinstance(f, torch._ops.OpOverload)]
        assert mine == [torch_op]
        for a, b in zip(tuple_of(result), tuple_of(expected), strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)  # the attention ops' own


@pytest.mark.parametrize("place", [0, 1])
def test_subclasses_see_one_call(way: str, place: int) -> None:
    op = ir.ops.rms_norm
    call, torch_op = called(op, way)
    values = list(inputs(op))
    call(*values)
    values[place] = values[place].as_subclass(Watched)
    Watched.seen = []
    result = call(*values)
    assert Watched.seen == [torch_op]
    assert isinstance(result, Watched)
    torch.testing.assert_close(
        result.as_subclass(Tensor), op.native(*inputs_plain(values)), atol=1e-5, rtol=1.3e-6
    )


def inputs_plain(values: list[Any]) -> list[Any]:
    return [v.as_subclass(Tensor) if isinstance(v, Tensor) else v for v in values]


def test_parameters_and_buffers_are_plain() -> None:
    weight = torch.nn.Parameter(torch.randn(8), requires_grad=False)
    x = torch.nn.Buffer(torch.randn(2, 8))
    assert_equal(ir.ops.rms_norm(x, weight, 1e-6), ir.ops.rms_norm(x, weight.data, 1e-6))


def test_a_mode_sees_calls_of_maybe_inplace() -> None:
    op = ir.ops.fused_add_rms_norm
    values = inputs(op)
    with SeenByDispatchMode() as mode:
        op.maybe_inplace(*values)
    assert mode.seen == [op.torch_ops.maybe_inplace]


# Modules


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8))
        self.op = ir.ops.rms_norm
        self.fused = ir.ops.fused_add_rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, self.weight, 1e-6) + self.fused(x, x, self.weight, 1e-6)[1]


class Bound(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.donating = ir.ops.fused_add_rms_norm.maybe_inplace
        self.pinned = ir.ops.rms_norm.using("aten", "native")
        self.both = ir.ops.fused_add_rms_norm.using("native").maybe_inplace

    def forward(self, x: Tensor) -> Tensor:
        a, _ = self.donating(x * 1, x * 2, None, 1e-6)
        b, _ = self.both(x * 1, x * 2, None, 1e-6)
        return a + b + self.pinned(x, None, 1e-6)


@pytest.mark.parametrize("kind", [Norm, Bound])
@pytest.mark.parametrize("way_of_copying", ["deepcopy", "copy", "pickle", "save"])
def test_modules_that_hold_ops_can_be_copied(
    kind: type[torch.nn.Module], way_of_copying: str, tmp_path: Any
) -> None:
    module, x = kind(), torch.randn(3, 8)
    if way_of_copying == "save":
        torch.save(module, tmp_path / "module.pt")
        other = torch.load(tmp_path / "module.pt", weights_only=False)
    else:
        other = {
            "deepcopy": copy.deepcopy,
            "copy": copy.copy,
            "pickle": lambda m: pickle.loads(pickle.dumps(m)),
        }[way_of_copying](module)
    assert_equal(other(x), module(x))
    if kind is Norm:
        assert other.op is ir.ops.rms_norm
    if way_of_copying == "deepcopy" and kind is Norm:
        assert other.weight is not module.weight


def declare_rms_norm(namespace: str | None = None) -> ir.IrOp:
    with ir.isolated_registry(namespace):

        @ir.register_op(allow_inplace=True)
        def rms_norm(x: Tensor) -> Tensor:
            return x * 7

    return rms_norm


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))]
)
def test_a_copy_of_an_op_is_that_op_in_whatever_registry(again: Any) -> None:
    op = declare_rms_norm()
    assert again(op) is op
    assert again(op.maybe_inplace) is op.maybe_inplace
    assert again(op.using("native")) is op.using("native")


def test_an_op_that_is_not_there_cannot_be_unpickled() -> None:
    text = pickle.dumps(declare_rms_norm("pickled_here"), protocol=0)
    with pytest.raises(UnknownOpError, match="registry 'pickled_away', which does not exist here"):
        pickle.loads(text.replace(b"pickled_here", b"pickled_away"))


def test_an_op_that_was_taken_back_cannot_be_pickled() -> None:
    with suppress(KeyError), ir.isolated_registry("was_taken") as registry, registry.transaction():

        @ir.register_op
        def doubled(x: Tensor) -> Tensor:
            return x * 2

        raise KeyError
    with pytest.raises(UnknownOpError, match="no longer registered in 'was_taken'"):
        pickle.dumps(doubled)


# autocast


def projected(registry: ir.Registry) -> ir.IrOp:
    """A matrix product, which torch casts, with a kernel that does not."""

    def project(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight)

    op = ir.register_op(project)
    op.register_impl("vendor")(lambda x, weight: (x.double() @ weight.double().t()).to(x.dtype))
    op.set_default(["vendor"])
    return op


@pytest.mark.parametrize("way", ["call", "using", "scope", "torch op", "gradient"])
def test_under_autocast_an_op_casts_as_torch_does(registry: ir.Registry, way: str) -> None:
    op = projected(registry)
    x, w = torch.randn(3, 8), torch.randn(4, 8, requires_grad=way == "gradient")
    call = {"using": op.using("vendor"), "torch op": op.torch_op}.get(way, op)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            with ir.priority(project=["vendor"]) if way == "scope" else nullcontext():
                found = call(x, w)
            wanted = torch.nn.functional.linear(x, w)
        assert_equal(found, wanted)
        assert found.dtype == torch.bfloat16
        assert call(x, w).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert call(x, w).dtype == torch.float32


def test_under_autocast_linear_is_that_of_torch() -> None:
    x, w = torch.randn(3, 64), torch.randn(32, 64)
    for provider in ir.ops.linear.supported_providers():
        with torch.autocast("cpu", torch.bfloat16):
            found = ir.ops.linear.using(provider)(x, w)
            assert_equal(found, torch.nn.functional.linear(x, w))


def test_kernels_are_passed_over_under_autocast(registry: ir.Registry) -> None:
    op = projected(registry)
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert op.dispatch(x, w).provider == "native"
        assert "torch.autocast is on" in str(ir.explain(op, x, w))
        with pytest.raises(ProviderRejectedError, match="vendor! is required"):
            op.using("vendor!")(x, w)
    assert op.dispatch(x, w).provider == "vendor"
    torch.set_autocast_enabled("cuda", True)  # for tensors elsewhere
    try:
        assert op.dispatch(x, w).provider == "vendor"
    finally:
        torch.set_autocast_enabled("cuda", False)


# Their products keep the dtype of the operands, so autocast changes it, as for torch's functions.
CASTING = {"conv_nd", "fused_experts", "linear", "patch_matmul"}


def cast(values: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(
        v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in values
    )


@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        *((n, torch.bfloat16) for n in ir.ops.__all__ if n != "all_reduce_rms_norm"),
        *((n, torch.float16) for n in sorted(CASTING)),
    ],
)
def test_every_op_runs_under_autocast(name: str, autocast: torch.dtype) -> None:
    """With the values that it documents; all_reduce_rms_norm, which needs ranks, is a composite."""
    op = op_of(name)
    for dtype in (torch.float32, torch.float16):
        values = op.generate_inputs(dtype=dtype)
        casts = name in CASTING
        with ir.priority({part: ["native"] for part in ir.ops.__all__}):  # composites call others
            expected = op.native(*copy.deepcopy(cast(values, autocast) if casts else values))
            with torch.autocast("cpu", autocast):
                results = op(*copy.deepcopy(values))
        room = op.get_tolerance(autocast) if casts else Tolerance(0, 0)
        for a, b in zip(tuple_of(results), tuple_of(expected), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a.double(), b.double(), atol=room.atol, rtol=room.rtol)


@pytest.mark.parametrize("name", ["causal_attention", "linear_w8a16"])
def test_autocast_does_not_change_ops_that_are_computed_in_float32(name: str) -> None:
    op = op_of(name)
    values, recorded = inputs(op, dtype=torch.bfloat16), inputs(op, grad=True, dtype=torch.bfloat16)
    kernel, expected = op.dispatch(*values).provider, op(*values)
    batched = torch.vmap(lambda x: op(x, *recorded[1:]))
    differentiable, batch = op(*recorded), batched(recorded[0][None])
    with torch.autocast("cpu", torch.float16):
        assert op.dispatch(*values).provider == kernel != "native", "its kernels are not rejected"
        for call in (op, op.torch_op, op.using(f"{kernel}!")):
            assert_equal(call(*values), expected)
        for call in (op, op.torch_op):
            assert_equal(call(*recorded), differentiable)
        assert_equal(batched(recorded[0][None]), batch)

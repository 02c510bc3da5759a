"""Functions of a kernel library as implementations of ops."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from opweave import ir
from opweave.ir import IrOp, rules
from opweave.ir.errors import DuplicateImplError, InvalidOpError
from opweave.kernels.wrap import (
    FunctionByArgument,
    HubKernel,
    ModuleFunction,
    Output,
    Wrapped,
    mutating,
    opaque,
    undispatched,
    wrap,
)


def gate(x: Tensor, scale: float = 1.0) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return silu(first) * second * scale


def gate_into(out: Tensor, x: Tensor, scale: float) -> None:
    out.copy_(gate(x, scale))


def half_of(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def add(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return (x + x_residual) * weight, x + x_residual


@pytest.fixture
def gated() -> Iterator[IrOp]:
    with ir.isolated_registry():
        yield ir.register_op(gate)


@pytest.fixture
def added() -> Iterator[IrOp]:
    with ir.isolated_registry():
        yield ir.register_op(add)


X = torch.randn(3, 8)


def test_a_function_that_writes_its_output(gated: IrOp) -> None:
    wrap(gated, "acme", gate_into, [Output(half_of), "x", "scale"])
    call = gated.using("acme!")
    torch.testing.assert_close(call(X, 2.0), gate(X, 2.0))
    torch.testing.assert_close(torch.compile(call, backend="opweave")(X, 3.0), gate(X, 3.0))


def test_a_function_that_returns_its_result(gated: IrOp) -> None:
    wrap(gated, "acme", gate, {"scale": lambda scale: 2 * scale, "x": "x"})
    torch.testing.assert_close(gated.using("acme!")(X), gate(X, 2.0))


def test_constants_are_passed_as_they_are(gated: IrOp) -> None:
    wrap(gated, "acme", gate, ["x", 5.0])
    torch.testing.assert_close(gated.using("acme!")(X), gate(X, 5.0))


def test_results_are_picked_from_a_longer_tuple(added: IrOp) -> None:
    def kernel(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[object, ...]:
        normed, total = add(x, residual, weight)
        return total, "block size", normed

    wrap(added, "acme", kernel, ["x", "x_residual", "weight"], results=(2, 0))
    found = added.using("acme!")(X, X, X)
    torch.testing.assert_close(found, add(X, X, X))


def test_a_function_that_overwrites_its_inputs_gets_copies(added: IrOp) -> None:
    def kernel(x: Tensor, residual: Tensor, weight: Tensor) -> None:
        residual += x
        torch.mul(residual, weight, out=x)

    wrap(added, "acme", kernel, [Output("x"), Output("x_residual"), "weight"])
    x, residual = X.clone(), X.clone()
    found = added.using("acme!")(x, residual, X)
    torch.testing.assert_close(found, add(X, X, X))
    assert torch.equal(x, X)
    assert torch.equal(residual, X)


def test_outputs_in_another_order(added: IrOp) -> None:
    def kernel(total: Tensor, normed: Tensor, x: Tensor, residual: Tensor, weight: Tensor) -> None:
        torch.add(x, residual, out=total)
        torch.mul(total, weight, out=normed)

    def make(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    arguments = [Output(make, 1), Output(make), "x", "x_residual", "weight"]
    wrap(added, "acme", kernel, arguments)
    torch.testing.assert_close(added.using("acme!")(X, X, X), add(X, X, X))


def test_a_named_function_is_imported_at_the_first_call(
    gated: IrOp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "acme_lib.py").write_text("class Ops:\n    def double(x):\n        return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    wrap(gated, "acme", "acme_lib:Ops.double", [lambda x: x.chunk(2, dim=-1)[0]])
    assert "acme_lib" not in sys.modules
    assert torch.equal(gated.using("acme!")(X), 2 * X[:, :4])
    assert isinstance(sys.modules.pop("acme_lib"), ModuleType)


def test_a_library_that_is_not_installed_is_the_reason(gated: IrOp) -> None:
    wrap(gated, "acme", "no_such_library.ops:gate", ["x", "scale"])
    with ir.priority({"gate": ["acme"]}):
        text = str(ir.explain(gated, X))
    assert "no_such_library is not installed" in text


def test_the_rule_decides(gated: IrOp) -> None:
    wrap(gated, "acme", gate, ["x", "scale"], supports_args=rules.dtype("x", torch.float64))
    with ir.priority({"gate": ["acme"]}), ir.record() as record:
        gated(X)
        gated(X.double())
    assert record.selected_impls == {"gate": {"acme": 1, "native": 1}}


def test_the_place_is_the_callers(gated: IrOp) -> None:
    wrap(gated, "acme", gate, ["x", "scale"])
    assert gated.impls["acme"].site.file == __file__


def test_a_second_registration_needs_override(gated: IrOp) -> None:
    wrap(gated, "acme", gate, ["x", 1.0])
    with pytest.raises(DuplicateImplError, match="override=True"):
        wrap(gated, "acme", gate, ["x", 2.0])
    wrap(gated, "acme", gate, ["x", 3.0], override=True)
    torch.testing.assert_close(gated.using("acme!")(X), gate(X, 3.0))


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (gate, ["y"], "'y', which is not a parameter of the op. Known: scale, x"),
        (gate, [lambda y: y], "'y', which is not a parameter"),
        (gate, [Output(torch.empty_like)], "parameters of .* cannot be read"),
        (gate, [Output("x"), Output("x")], "1 Outputs are needed, one per result; found 2"),
        (gate, [Output("x", 1)], "1 Outputs are needed"),
        ("acme", ["x"], "'acme' does not name a function, as 'package.module:function' does"),
        ("acme:1", ["x"], "'acme:1' does not name a function"),
    ],
)
def test_mistakes(gated: IrOp, function: object, arguments: list[object], message: str) -> None:
    with pytest.raises(InvalidOpError, match=message):
        wrap(gated, "acme", function, arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"repository": "acme/gate"},
        {"repository": "acme/gate", "version": 1, "revision": "main"},
        {"repository": Path("gate"), "version": 1},
    ],
)
def test_a_repository_is_pinned_and_a_path_is_not(given: dict[str, object]) -> None:
    with pytest.raises(InvalidOpError, match="one of version=, revision= and lockfile="):
        HubKernel(name="gate", **given)  # type: ignore[arg-type]


def test_a_choice_of_functions(
    gated: IrOp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = "def double(x):\n    return 2 * x\ndef negate(x):\n    return -x\n"
    (tmp_path / "acme_pair.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    choice = FunctionByArgument("scale", {1.0: "acme_pair:double", 2.0: "acme_pair:negate"})
    wrap(gated, "acme", choice, [lambda x: x.chunk(2, dim=-1)[0]])
    call = gated.using("acme!")
    assert torch.equal(call(X), 2 * X[:, :4])
    assert torch.equal(call(X, 2.0), -X[:, :4])
    del sys.modules["acme_pair"]
    with pytest.raises(InvalidOpError, match="'size', which is not a parameter"):
        wrap(gated, "acme2", FunctionByArgument("size", choice.functions), ["x"])


def test_a_choice_from_a_library_that_is_not_installed(gated: IrOp) -> None:
    wrap(gated, "acme", FunctionByArgument("scale", {1.0: "no_such_library:gate"}), ["x"])
    assert gated.impls["acme"].unsupported_reason == "no_such_library is not installed"


def test_a_result_of_another_form_is_converted() -> None:
    def vectorwise_quant(x: Tensor) -> tuple[Tensor, Tensor, None]:
        absmax = x.abs().amax(-1)
        codes = (x * (127 / absmax.unsqueeze(-1))).round().to(torch.int8)
        return codes, absmax, None

    def codes_and_scales(result: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        codes, absmax = result
        return codes, (absmax / 127).view(*x.shape[:-1], 1)

    with ir.isolated_registry() as registry:
        op = ir.register_op(ir.ops.dynamic_per_token_quant_int8.native)
        assert op.registry is registry
        wrap(op, "acme", vectorwise_quant, ["x"], results=(0, 1), result=codes_and_scales)
        x = torch.randn(2, 3, 8)
        for found, expected in zip(op.using("acme!")(x), op.native(x), strict=True):
            torch.testing.assert_close(found, expected)


def test_outputs_can_be_converted(gated: IrOp) -> None:
    outputs = [Output(half_of), "x", "scale"]
    wrap(gated, "acme", gate_into, outputs, result=lambda out, scale: out / scale)
    assert torch.allclose(gated.using("acme!")(X, 4.0), gate(X))


def test_a_conversion_takes_parameters_of_the_op(gated: IrOp) -> None:
    with pytest.raises(InvalidOpError, match="'size', which is not a parameter"):
        wrap(gated, "acme", gate, ["x"], result=lambda out, size: out)
    with pytest.raises(InvalidOpError, match="result= takes no value"):
        wrap(gated, "acme", gate, ["x"], result=lambda: None)


def test_an_empty_batch_does_not_reach_the_function(gated: IrOp) -> None:
    def kernel(x: Tensor) -> Tensor:
        raise AssertionError("an empty grid cannot be launched")

    wrap(gated, "acme", kernel, ["x"])
    call = gated.using("acme!")
    assert call(X[:0]).shape == (0, 4)
    assert torch.compile(call, backend="opweave")(X[:0]).shape == (0, 4)
    with pytest.raises(AssertionError, match="empty grid"):
        call(X)


def test_an_implementation_knows_what_it_wraps(gated: IrOp) -> None:
    wrap(gated, "acme", "acme_lib.ops:gate", ["x", "scale"])
    wrapped = Wrapped.by(gated.impls["acme"])
    assert wrapped is not None
    assert [function.name for function in wrapped.named()] == ["acme_lib.ops:gate"]
    assert wrapped.arguments == ["x", "scale"]
    assert Wrapped.by(gated.impls["native"]) is None


def test_the_file_of_a_function_is_found_without_an_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "acme_files").mkdir()
    for name in ("__init__", "ops"):
        (tmp_path / "acme_files" / f"{name}.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    assert ModuleFunction("acme_files.ops:f").file() == tmp_path / "acme_files" / "ops.py"
    assert ModuleFunction("acme_files:f").file() == tmp_path / "acme_files" / "__init__.py"
    assert ModuleFunction("acme_files.other:f").file() is None
    assert ModuleFunction("no_such_library:f").file() is None


# Implementations that are opaque torch ops, which plain calls skip.

NAMESPACE = "opweave_tests_opaque"


class Ops(NamedTuple):
    tripled: IrOp
    doubled: IrOp


def tripled(x: Tensor) -> Tensor:
    return x * 3.0


def doubled(x: Tensor) -> Tensor:
    return x * 2.0


def triple(x: Tensor) -> Tensor:
    return torch.mul(x, 3.0)


def double(x: Tensor) -> None:
    torch.mul(x, 2.0, out=x)


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    with ir.isolated_registry():
        found = Ops(
            ir.register_op(tripled), ir.register_op(doubled, activations=["x"], allow_inplace=True)
        )
        found.tripled.register_impl("mine", traits={"differentiable"})(
            opaque(found.tripled, NAMESPACE)(triple)
        )
        traced = mutating(NAMESPACE, "double(Tensor(a!) x) -> ()")(double)

        def plain(x: Tensor) -> Tensor:
            double(x)
            return x

        @found.doubled.register_impl("mine", inplace=True)
        @undispatched(plain)
        def _(x: Tensor) -> Tensor:
            traced(x)
            return x

        yield found


class Seen(TorchDispatchMode):
    """A mode, for which calls are not plain."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def events(call: Any, *arguments: Tensor) -> set[str]:
    with profile() as found:
        call(*arguments)
    return {event.name for event in found.function_events}


def test_plain_calls_skip_the_torch_op(ops: Ops) -> None:
    op, x = ops.tripled, torch.randn(4)
    call, name = op.using("mine!"), f"{NAMESPACE}::tripled"
    for _ in range(2):  # the results of the first call are checked
        found = events(call, x)
        assert "aten::mul" in found
        assert name not in found
    assert torch.equal(call(x), x * 3)
    with Seen():
        assert name in events(call, x)


def test_gradients_are_those_of_the_function(ops: Ops) -> None:
    x = torch.randn(4, requires_grad=True)
    ops.tripled.using("mine!")(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 3.0))


def test_plain_donations_skip_the_torch_op(ops: Ops) -> None:
    op = ops.doubled
    call = op.using("mine!").maybe_inplace
    x = torch.ones(4)
    with torch.no_grad():
        version = x._version
        assert f"{NAMESPACE}::double" not in events(call, x)
        assert torch.equal(x, torch.full((4,), 2.0))
        assert x._version > version  # so that autograd finds values that it saved overwritten
        y = torch.ones(4)
        with Seen():
            assert f"{NAMESPACE}::double" in events(call, y)
    z = torch.ones(4)
    assert torch.equal(op.using("mine!")(z), z * 2)
    assert torch.equal(z, torch.ones(4))

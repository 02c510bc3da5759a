"""Declaring ops: what is accepted, and what is refused."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
from collections.abc import Sequence
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import rules
from opweave.ir.errors import (
    DuplicateOpError,
    InvalidNameError,
    InvalidOpError,
    UnknownOpError,
    UnknownTraitError,
)
from opweave.ir.ops.norm import rms_norm

pytestmark = pytest.mark.usefixtures("registry")


def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    """Multiply *x* by *factor*.

    Elementwise.
    """
    return x * factor


@pytest.fixture
def op(registry: ir.Registry) -> ir.IrOp:
    return ir.register_op(scaled)


def test_bare_and_with_options() -> None:
    bare = ir.register_op(scaled)
    named = ir.register_op(name="other")(scaled)
    empty = ir.register_op()(lambda_op)
    assert (bare.name, named.name, empty.name) == ("scaled", "other", "lambda_op")
    for op in (bare, named, empty):
        assert isinstance(op, ir.IrOp)
        assert ir.current_registry().op(op.name) is op
        assert getattr(ir.ops, op.name) is op
        assert torch.equal(op(torch.ones(2)), torch.full((2,), 2.0))


def lambda_op(x: Tensor) -> Tensor:
    return x * 2


def declare(parameters: str) -> ir.IrOp:
    names: dict[str, Any] = {"Tensor": Tensor, "torch": torch}
    exec(f"def made({parameters}) -> Tensor:\n    return x", names)
    return ir.register_op(names["made"])


@pytest.mark.parametrize("star", ["", "*, "])
@pytest.mark.parametrize(
    "name", ["using", "donate", "autocast", "annotated", "torch_op", "entries"]
)
def test_names_that_calls_of_torch_ops_carry_are_refused(name: str, star: str) -> None:
    taken = "names: annotated, autocast, donate, entries, torch_op, using"
    with pytest.raises(InvalidOpError, match=f"'made': .* called '{name}'.*{taken}"):
        declare(f"x: Tensor, {star}{name}: float = 1.0")


@pytest.mark.parametrize(
    "default", ["float = float('inf')", "float = float('nan')", "int = 2**70", "str = 'a\"b\\'c'"]
)
def test_defaults_that_torch_cannot_write_are_refused(default: str) -> None:
    with pytest.raises(
        InvalidOpError, match=r"cannot express the default .* of 'y' .* Use None as the default"
    ):
        declare(f"x: Tensor, y: {default}")


@pytest.mark.parametrize(
    ("annotation", "default", "kind"),
    [
        (int, 1.5, "int"),
        (int, True, "int"),
        (int, None, "int"),
        (bool, 1, "bool"),
        (str, 1, "str"),
        (int | None, "a", r"int \| None"),
        (list[int], [1], r"list\[int\]"),
    ],
)
def test_defaults_of_another_type(
    registry: ir.Registry, annotation: Any, default: object, kind: str
) -> None:
    def made(x: Tensor, y: Any = default) -> Tensor:
        return x

    made.__annotations__["y"] = annotation
    with pytest.raises(
        InvalidOpError,
        match=rf"'made': the default .* of 'y' does not match its annotation {kind}\. Change",
    ):
        ir.register_op(made)


def test_a_type_that_torch_has_not_is_refused_in_few_words() -> None:
    with pytest.raises(InvalidOpError, match="An op takes Tensor, int, float") as caught:
        declare("x: Tensor, y: dict = None")
    assert "dict_keys" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_the_native_function_stays_itself(op: ir.IrOp) -> None:
    assert op.native is scaled
    assert list(op.impls) == ["native"]
    assert op.impls["native"].impl_fn is scaled
    assert "differentiable" in op.impls["native"].traits
    assert op.supported_providers() == ["native"]


def test_repr_and_str_tell_what_and_where(op: ir.IrOp) -> None:
    assert "scaled" in repr(op)
    assert "factor" in repr(op)
    assert __file__ in repr(op)
    assert str(op) == "scaled: Multiply *x* by *factor*."
    impl = op.register_impl("alpha")(scaled) and op.impls["alpha"]
    assert "scaled" in repr(impl)
    assert "alpha" in repr(impl)
    assert __file__ in repr(impl)


def test_docstrings_and_signatures_are_the_native_functions() -> None:
    op = ir.register_op(scaled, activations=["x"], allow_inplace=True)
    for way in (op, op.maybe_inplace, op.using("native"), op.using("native").maybe_inplace):
        assert way.__doc__ == scaled.__doc__
        assert inspect.signature(way) == inspect.signature(scaled)
        assert "Multiply *x* by *factor*." in pydoc.render_doc(way)
        assert "factor:" in pydoc.render_doc(way)
        assert copy.copy(way).__doc__ == scaled.__doc__
        assert pickle.loads(pickle.dumps(way)).__doc__ == scaled.__doc__
    op(torch.ones(2))
    assert inspect.signature(op) == inspect.signature(scaled)
    assert (ir.IrOp.__doc__ or "").startswith("A functional operation")
    assert "registry" in inspect.signature(ir.IrOp).parameters


def test_the_site_is_the_line_of_the_declaration(op: ir.IrOp) -> None:
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    here = ir.register_op(name="here")(scaled)
    assert (here.site.file, here.site.line) == (__file__, line)
    op.register_impl("alpha")(scaled)
    assert op.impls["alpha"].site.line == line + 2


def test_torch_has_the_op_in_the_registrys_namespace(registry: ir.Registry) -> None:
    op = ir.register_op(name="both", allow_inplace=True)(scaled)
    packet = getattr(torch.ops, registry.namespace).both
    assert set(packet.overloads()) == {"default", "maybe_inplace"}
    assert op.torch_op is packet.default
    assert (
        str(packet.default._schema)
        == f"{registry.namespace}::both(Tensor x, float factor=2.) -> Tensor"
    )
    only = ir.register_op(name="only")(scaled)
    assert only.torch_op.overloads() if hasattr(only.torch_op, "overloads") else True
    assert getattr(torch.ops, registry.namespace).only.overloads() == ["default"]


def test_the_namespace_can_be_chosen() -> None:
    with ir.isolated_registry("a_shim") as registry:
        op = ir.register_op(scaled)
        assert registry.namespace == "a_shim"
        assert torch.ops.a_shim.scaled.default is op.torch_op
        assert torch.equal(torch.ops.a_shim.scaled(torch.ones(1), 3.0), torch.tensor([3.0]))


def test_the_real_namespace() -> None:
    assert torch.ops.opweave.rms_norm.default is ir.ops.rms_norm.torch_op
    assert ir.ops.rms_norm.registry.namespace == "opweave"


@pytest.mark.parametrize(
    "name", ["Scaled", "2x", "a-b", "a.b", "", "a b", "ünder", "x\n", "scaled_annotated", 7, None]
)
def test_ill_formed_op_names_are_refused(registry: ir.Registry, name: Any) -> None:
    with pytest.raises(InvalidNameError) as error:
        ir.register_op(name=name)(scaled if name is not None else (lambda x: x))
    assert repr(name if name is not None else "<lambda>") in str(error.value)
    assert not registry.ops


OP_NAMES = [
    "lambda", "is", "import", "class", "async", "name", "type", "slow", "run", "scoped", "self",
    "tensor", "default", "norm", "attention", "find_op", "__init__", "_",
]  # fmt: skip


@pytest.mark.parametrize("name", OP_NAMES)
def test_an_op_of_any_name_is_refused_or_works(registry: ir.Registry, name: str) -> None:
    try:
        op = ir.register_op(name=name, allow_inplace=True)(scaled)
    except InvalidNameError as error:
        if repr(name) in str(error) and not registry.ops:
            return
        raise
    x = torch.ones(2)
    for call in (op, op, op.torch_op, op.maybe_inplace, op.using("native")):
        assert torch.equal(call(x), x * 2)
    with ir.priority({name: ["native"]}):
        assert torch.equal(op(x, factor=3.0), x * 3)
    assert getattr(ir.ops, name) is op


NAMES = [
    "run", "scope", "type", "slow", "scoped", "t", "all", "any", "bool", "self_", "args",
    "values", "default_x", "impl_alpha", "impl_native", "Tensor", "Parameter", "torch_op",
    "tensor", "constant_20", "constant_21", "constant_22", "accepts_alpha", "copying_alpha",
    "impl_fn", "current_scope", "is_dynamo_compiling", "is_grad_enabled", "dispatch_mode_count",
    "plain_types", "using", "donate", "kwargs", "name", "op", "input", "len", "Exception",
    "make", "torch", "annotated", "out", "factory",
]  # fmt: skip


@pytest.mark.parametrize("parameter", NAMES)
def test_a_parameter_of_any_name_is_refused_or_works(registry: ir.Registry, parameter: str) -> None:
    source = (
        f"def native(x: T, y: T, {parameter}: float = 2.0, *, k: int = 1) -> T:\n"
        f"    return x * {parameter} + y * k\n"
    )
    namespace: dict[str, Any] = {"T": Tensor}
    exec(source, namespace)
    native = namespace["native"]
    try:
        op = ir.register_op(allow_inplace=True, activations=["x"])(native)
    except InvalidOpError as error:
        if repr(parameter) in str(error):
            return
        raise
    predicate: Any = rules.dtype("x", torch.float32) & rules.one_of(parameter, 3.0, 4.0)
    op.register_impl("alpha", supports_args=predicate, inplace=True)(native)
    accepts = dict(namespace)
    exec(source.replace("x *", "2 <").replace("+ y * k", ""), accepts)
    op.register_impl("beta", supports_args=accepts["native"])(native)
    op.set_default(["alpha", "beta"])
    x, y = torch.ones(2), torch.ones(2)
    for _ in range(2):
        for call in (op, op.torch_op, op.using("native"), op.maybe_inplace):
            assert torch.equal(call(x, y, 3.0), x * 4)
            assert torch.equal(call(x, y, **{parameter: 5.0}, k=2), x * 7)
            assert torch.equal(call(x, y), x * 3)
        with ir.priority(native=["beta"]):
            assert torch.equal(op(x, y, 3.0), x * 4)
    assert op.dispatch(x, y, 4.0).provider == "alpha"
    assert op.dispatch(x, y, 5.0).provider == "beta"
    assert op.dispatch(x, y, 1.0).provider == "native"


@pytest.mark.parametrize(
    "signature",
    [
        "(x: int) -> Tensor",
        "(x: Tensor, y=1) -> Tensor",
        "(x: Tensor)",
        "(x: Tensor) -> None",
        "(x: Tensor) -> Tensor | None",
        "(x: Tensor) -> list[Tensor]",
        "(x: Tensor) -> tuple[Tensor, ...]",
        "(x: Tensor) -> tuple[Tensor, int]",
        "(x: Tensor, /) -> Tensor",
        "(*x: Tensor) -> Tensor",
        "(x: Tensor, **y: Tensor) -> Tensor",
        "(self: Tensor) -> Tensor",
        "(x: Tensor, y: dict[str, int]) -> Tensor",
        "(x: Tensor, y: 'Nowhere') -> Tensor",
        "(x: Tensor, é: float) -> Tensor",
    ],
)
def test_what_cannot_be_an_op_is_refused(registry: ir.Registry, signature: str) -> None:
    names: dict[str, Any] = {"Tensor": Tensor}
    exec(f"def refused{signature}: ...", names)
    with pytest.raises(InvalidOpError, match="refused"):
        ir.register_op(names["refused"])
    assert not registry.ops


def test_keyword_only_parameters_lists_and_several_outputs() -> None:
    @ir.register_op
    def mixed(
        x: Tensor,
        parts: Sequence[Tensor],
        w: Optional[Tensor] = None,  # noqa: UP045 (both spellings)
        *,
        factor: float,
        flag: bool = True,
        sizes: list[int] | None = None,
        kind: str = "a",
        dtype: torch.dtype = torch.float64,
    ) -> tuple[Tensor, Tensor]:
        return (x * factor + sum(parts)).to(dtype), x + len(sizes or ()) + flag

    x = torch.ones(2)
    for call in (mixed, mixed, mixed.torch_op):
        a, b = call(x, [x, x], factor=3.0, sizes=[1, 2])
        assert a.dtype == torch.float64
        assert a.tolist() == [5, 5]
        assert b.tolist() == [4, 4]
    with pytest.raises(TypeError):
        mixed(x, [x])
    with pytest.raises(TypeError):
        mixed(x, [x], None, 3.0)


def test_an_op_made_by_hand_is_not_registered(registry: ir.Registry) -> None:
    op = ir.IrOp(scaled, registry)
    assert op.name == "scaled"
    assert not registry.ops
    assert "scaled" not in dir(getattr(torch.ops, registry.namespace))
    assert ir.register_op(scaled) is registry.op("scaled")


def test_a_second_op_of_that_name_is_refused(op: ir.IrOp, registry: ir.Registry) -> None:
    with pytest.raises(DuplicateOpError):
        ir.register_op(scaled)
    assert registry.op("scaled") is op
    assert list(registry.ops) == ["scaled"]
    assert torch.equal(op(torch.ones(1)), torch.tensor([2.0]))


def test_a_notebook_declares_an_op_again(op: ir.IrOp, registry: ir.Registry) -> None:
    def other(x: Tensor, factor: float = 3.0, shift: float = 1.0) -> Tensor:
        return x * factor + shift

    op.register_impl("alpha")(lambda x, factor=2.0: x * factor)
    x = torch.ones(2)
    for _ in range(2):
        again = ir.register_op(name="scaled", override=True)(other)
        assert registry.op("scaled") is again
        assert list(again.impls) == ["native"]
        for call in (again, again.torch_op, getattr(torch.ops, registry.namespace).scaled):
            assert torch.equal(call(x), torch.full((2,), 4.0))
        again.register_impl("alpha")(lambda x, factor=3.0, shift=1.0: x * factor + shift + 1)
        assert torch.equal(again.using("alpha")(x), torch.full((2,), 5.0))
    assert ir.register_op(override=True)(lambda_op) is registry.op("lambda_op"), "a new name, too"


def test_a_failed_transaction_brings_the_earlier_declaration_back(
    op: ir.IrOp, registry: ir.Registry
) -> None:
    def other(x: Tensor) -> Tensor:
        return x + 1

    def fails_after_declaring() -> None:
        ir.register_op(name="scaled", override=True)(other)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), registry.transaction():
        fails_after_declaring()
    assert registry.op("scaled") is op
    assert torch.equal(op.torch_op(torch.ones(1)), torch.tensor([2.0]))


def test_an_override_that_is_no_op_leaves_the_earlier_one(op: ir.IrOp) -> None:
    with pytest.raises(InvalidOpError):
        ir.register_op(name="scaled", override=True)(lambda x: x)
    assert torch.equal(ir.ops.scaled(torch.ones(1)), torch.tensor([2.0]))
    assert torch.equal(op.torch_op(torch.ones(1)), torch.tensor([2.0]))


def test_ops_that_come_with_opweave_stay() -> None:
    with pytest.raises(DuplicateOpError, match="opweave's own ops cannot be replaced"):
        rms_norm.registry.add(ir.IrOp(scaled, rms_norm.registry, name="rms_norm"), override=True)
    assert rms_norm.registry.op("rms_norm") is rms_norm


def test_isolated_registries_do_not_meet(op: ir.IrOp) -> None:
    with ir.isolated_registry() as inner:
        assert not inner.ops
        with pytest.raises(UnknownOpError):
            inner.op("scaled")
        other = ir.register_op(scaled)
        other.register_impl("alpha")(scaled)
        assert other is not op
    assert ir.current_registry().op("scaled") is op
    assert list(op.impls) == ["native"]


def test_activations_that_keep_their_strides() -> None:
    op = ir.register_op(allow_inplace=True, keeps_strides=["x"])(scaled)
    assert op.keeps_strides == {"x"}
    with pytest.raises(InvalidOpError, match="keeps_strides names 'factor', which is not an act"):
        ir.register_op(name="wrong", allow_inplace=True, keeps_strides=["factor"])(scaled)


def test_activations() -> None:
    def two(x: Tensor, weight: Tensor, xs: list[Tensor], x_b: Tensor) -> tuple[Tensor, Tensor]:
        return x, x_b

    op = ir.register_op(allow_inplace=True)(two)
    assert op.activations == ("x", "x_b")
    assert op.activation_indices == [0, 3]
    chosen = ir.register_op(name="chosen", activations=["weight", "x"])(two)
    assert chosen.activations == ("x", "weight")
    with pytest.raises(InvalidOpError, match="Did you mean 'weight'"):
        ir.register_op(name="wrong", activations=["wheight"])(two)
    with pytest.raises(InvalidOpError, match="2 output"):
        ir.register_op(name="wrong", activations=["x"], allow_inplace=True)(two)
    with pytest.raises(InvalidOpError, match="xs"):
        ir.register_op(name="wrong", activations=["xs", "x"], allow_inplace=True)(two)


def test_native_traits_are_checked(registry: ir.Registry) -> None:
    op = ir.register_op(native_traits={"batch_invariant"})(scaled)
    assert op.impls["native"].traits == {"batch_invariant", "differentiable"}
    with pytest.raises(UnknownTraitError):
        ir.register_op(name="wrong", native_traits={"batch_invarient"})(scaled)
    assert list(registry.ops) == ["scaled"]

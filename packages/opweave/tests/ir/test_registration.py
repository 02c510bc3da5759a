"""Registering implementations: what is accepted, what is refused, and what they are known by."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import rules
from opweave.ir.errors import (
    DuplicateImplError,
    InvalidNameError,
    InvalidOpError,
    MissingInputGeneratorError,
    MissingToleranceError,
    PredicateSignatureError,
    SchemaMismatchError,
    UnknownTraitError,
)
from opweave.ir.schema import OWN_PROVIDERS
from opweave.registration import Owner, owned_by

pytestmark = pytest.mark.usefixtures("registry")


def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    """Multiply *x* by *factor*.

    Elementwise.
    """
    return x * factor


@pytest.fixture
def op(registry: ir.Registry) -> ir.IrOp:
    return ir.register_op(scaled)


def test_a_registration_leaves_native_the_default(op: ir.IrOp) -> None:
    def half(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor / 2

    assert op.register_impl("alpha")(half) is half
    assert list(op.impls) == op.supported_providers() == ["native", "alpha"]
    assert op.get_priority() == ["native"]
    assert torch.equal(op(torch.ones(1)), torch.tensor([2.0]))
    impl = op.impls["alpha"]
    assert (impl.provider, impl.op, impl.impl_fn) == ("alpha", op, half)
    assert impl.supported
    assert impl.supports_all_args
    assert not impl.inplace
    assert impl.traits == frozenset()


def test_impls_is_a_view_that_cannot_be_written(op: ir.IrOp) -> None:
    with pytest.raises(TypeError):
        op.impls["alpha"] = op.impls["native"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        op.impls["native"].supported = False  # type: ignore[misc]


def test_an_unsupported_implementation_is_passed_over(op: ir.IrOp) -> None:
    op.register_impl("alpha", supported=False, unsupported_reason="no such device")(scaled)
    assert list(op.impls) == ["native", "alpha"]
    assert op.supported_providers() == ["native"]
    with ir.priority(scaled=["alpha"]):
        assert op.dispatch(torch.ones(1)).provider == "native"
        assert "no such device" in str(ir.explain(op, torch.ones(1)))


OTHER_SCHEMAS = [
    "x: Tensor",
    "x: Tensor, factor: float = 2.0, more: int = 1",
    "x: Tensor, scale: float = 2.0",
    "factor: float = 2.0, x: Tensor = ...",
    "x: Tensor, factor: float = 3.0",
    "x: Tensor, factor: float",
    "x: Tensor = None, factor: float = 2.0",
    "x: Tensor, *, factor: float = 2.0",
    "x: Tensor, /, factor: float = 2.0",
    "*args: Any, **kwargs: Any",
    "x: Tensor, factor: int = 2.0",
    "x: Tensor, factor: float | None = 2.0",
    "x: Tensor, factor: Optional[float] = 2.0",
    "x: list[Tensor], factor: float = 2.0",
    "x: Tensor, factor: float = 2.0) -> tuple[Tensor, Tensor]",
    "x: Tensor, factor: float = 2.0) -> None",
]


@pytest.mark.parametrize("parameters", OTHER_SCHEMAS)
def test_another_schema_is_refused(op: ir.IrOp, parameters: str) -> None:
    parameters, _, returned = parameters.partition(") -> ")
    names: dict[str, Any] = {"Any": Any, "Optional": Optional, "Tensor": Tensor}
    exec(f"def function({parameters}) -> {returned or 'Tensor'}: ...", names)
    function, before = names["function"], dict(op.impls)
    with pytest.raises(SchemaMismatchError, match="does not match native schema"):
        op.register_impl("alpha")(function)
    assert dict(op.impls) == before


@pytest.mark.parametrize(
    "predicate",
    [
        lambda x=None: True,
        lambda x, factor=3.0: True,
        lambda x, scale=2.0: True,
        lambda x, factor=2.0, more=1: True,
        lambda *args: True,
        lambda x, **rest: True,
        lambda: True,
        True,
        "yes",
        3,
        dict,
        rules.dtype("y", torch.float32),
        rules.contiguous("factor"),
        rules.one_of("scale", 1),
        rules.same_dtype("x"),
        rules.same_shape("x", "y"),
        rules.cpu("x") & rules.cuda("z"),
        rules.cpu("x") | rules.ndim("z", 1),
        rules.custom(lambda y: True, "why"),
        rules.custom(lambda: True, "why"),
        rules.cpu("x") & (rules.cuda("x") | rules.custom(lambda x, scale: True, "why")),
    ],
)
def test_a_predicate_that_does_not_fit_is_refused(op: ir.IrOp, predicate: Any) -> None:
    before = dict(op.impls)
    with pytest.raises(PredicateSignatureError):
        op.register_impl("alpha", supports_args=predicate)(scaled)
    assert dict(op.impls) == before


@pytest.mark.parametrize("as_rule", [False, True])
@pytest.mark.parametrize(
    "predicate",
    [
        lambda factor: factor == 3.0,
        lambda *, factor: factor == 3.0,
        lambda factor, x: factor == 3.0 and x.ndim == 1,
        lambda x, factor=2.0: factor == 3.0,
        lambda x, *, factor=2.0: factor == 3.0,
    ],
)
def test_a_predicate_gets_the_parameters_that_it_names(
    op: ir.IrOp, predicate: Any, as_rule: bool
) -> None:
    given = rules.cpu("x") & rules.custom(predicate, "another factor") if as_rule else predicate
    op.register_impl("alpha", supports_args=given)(lambda x, factor=2.0: x * factor + 1)
    op.set_default(["alpha"])
    x = torch.ones(3)
    for _ in range(2):  # at first, and by the generated code
        assert op(x, 3.0).tolist() == [4.0] * 3
        assert op(x, factor=3.0).tolist() == [4.0] * 3
        assert op(x).tolist() == [2.0] * 3
    assert op.dispatch(x, factor=3.0).provider == "alpha"
    assert op.dispatch(x).provider == "native"
    reason = ir.explain(op, x).verdicts[0].reason
    assert reason == "another factor" if as_rule else "returned False" in reason


@pytest.mark.parametrize(
    "provider", ["native", "unfused", "Alpha", "a-b", "", "1st", 3, "a!", "a,b"]
)
def test_reserved_and_ill_formed_providers_are_refused(op: ir.IrOp, provider: Any) -> None:
    before = dict(op.impls)
    with pytest.raises(InvalidNameError):
        op.register_impl(provider)(scaled)
    assert dict(op.impls) == before


@pytest.mark.parametrize("owner", [None, Owner("acme", "acme-device", "0.1.0")])
@pytest.mark.parametrize("provider", OWN_PROVIDERS)
def test_the_providers_of_opweave_are_its_own(provider: str, owner: Owner | None) -> None:
    def rms_norm(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> Tensor:
        return x

    with owned_by(owner), pytest.raises(InvalidNameError, match=f"{provider!r} comes with opweave"):
        ir.ops.rms_norm.register_impl(provider, override=True)(rms_norm)


def test_an_op_of_others_may_have_a_provider_of_that_name(op: ir.IrOp) -> None:
    op.register_impl("aten")(scaled)
    assert "aten" in op.impls


def test_a_provider_that_a_plugin_took_is_refused_with_its_name(op: ir.IrOp) -> None:
    with owned_by(Owner("acme", "acme-device", "0.1.0")):
        op.register_impl("alpha")(scaled)
    with pytest.raises(DuplicateImplError, match=r"by the plugin acme \(acme-device 0\.1\.0\)"):
        op.register_impl("alpha")(lambda x, factor=2.0: x)


def test_other_refusals_leave_the_implementations_alone(op: ir.IrOp) -> None:
    before = dict(op.impls)
    with pytest.raises(UnknownTraitError):
        op.register_impl("alpha", traits={"fast"})(scaled)
    with pytest.raises(InvalidOpError):
        op.register_impl("alpha", inplace=True)(scaled)
    assert dict(op.impls) == before
    op.register_impl("alpha", traits="batch_invariant")(scaled)
    assert op.impls["alpha"].traits == {"batch_invariant"}


# Identity of the source

SOURCE = (
    "from opweave import ir\ndef kernel(x, factor=2.0):\n    return x * factor\n"
    "def accepts(x, factor=2.0):\n    return True\n"
)


def load(path: Path, source: str) -> ModuleType:
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def uuid_of(
    folder: Path, kernel: str, predicate: str | None = None, provider: str = "alpha"
) -> str:
    with ir.isolated_registry():
        op = ir.register_op(scaled)
        accepts = load(folder / "predicate.py", predicate).accepts if predicate else None
        function = load(folder / "kernel.py", kernel).kernel
        op.register_impl(provider, supports_args=accepts)(function)
        return op.impls[provider].uuid()


def test_the_uuid_follows_the_source(tmp_path: Path) -> None:
    first = uuid_of(tmp_path, SOURCE)
    assert first == uuid_of(tmp_path, SOURCE)
    changed = SOURCE.replace("x * factor", "factor * x")
    others = [
        uuid_of(tmp_path, changed),
        uuid_of(tmp_path, SOURCE, SOURCE),
        uuid_of(tmp_path, SOURCE, SOURCE.replace("True", "False")),
        uuid_of(tmp_path, SOURCE, provider="beta"),
    ]
    assert len({first, *others}) == 5


def test_functions_without_a_file_differ_by_their_code(op: ir.IrOp) -> None:
    uuids = []
    for body in ("x * factor", "x + factor"):
        with ir.isolated_registry():
            other = ir.register_op(scaled)
            other.register_impl("alpha")(eval(f"lambda x, factor=2.0: {body}"))
            uuids.append(other.impls["alpha"].uuid())
    assert uuids[0] != uuids[1]


# Fake implementation, tolerances, inputs


def test_register_fake_replaces_native_under_fake_tensors(op: ir.IrOp) -> None:
    @op.register_fake
    def fake(x: Tensor, factor: float = 2.0) -> Tensor:
        return x.new_empty(7)

    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2))
        assert op(x).shape == (7,)
        assert op.torch_op(x).shape == (7,)
    assert op(torch.ones(2)).shape == (2,)
    with pytest.raises(SchemaMismatchError):
        op.register_fake(lambda x: x)
    assert op.fake is fake


def test_tolerances_are_set_by_op(op: ir.IrOp) -> None:
    other = ir.register_op(name="other")(scaled)
    op.override_tolerance(torch.float32, atol=0.5, rtol=0.25)
    op.override_tolerance(torch.int32, atol=1, rtol=0)
    assert op.get_tolerance(torch.float32) == ir.Tolerance(0.5, 0.25)
    assert op.get_tolerance(torch.int32) == ir.Tolerance(1, 0)
    op.override_tolerance(torch.float32, atol=2, rtol=0, provider="rounds")
    assert op.get_tolerance(torch.float32, "rounds") == ir.Tolerance(2, 0)
    assert op.get_tolerance(torch.float32, "other") == ir.Tolerance(0.5, 0.25)
    assert op.get_tolerance(torch.int32, "rounds") == ir.Tolerance(1, 0)
    assert other.get_tolerance(torch.float32) == ir.Tolerance(1e-5, 1.3e-6)
    assert other.get_tolerance(torch.int8) == ir.Tolerance(1, 0)
    with pytest.raises(MissingToleranceError):
        other.get_tolerance(torch.int32)
    assert ir.ops.rms_norm.get_tolerance(torch.float16) == ir.Tolerance(1e-2, 2e-3)
    assert ir.ops.fused_add_rms_norm.get_tolerance(torch.float16) == ir.Tolerance(1e-2, 2e-3)


def test_input_generators(op: ir.IrOp) -> None:
    assert not op.has_input_generator
    with pytest.raises(MissingInputGeneratorError):
        op.generate_inputs()

    @op.register_input_generator
    def inputs(num_tokens: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, float]:
        return torch.ones(num_tokens, dtype=dtype), 3.0

    assert op.has_input_generator
    x, factor = op.generate_inputs(num_tokens=5, dtype=torch.float64)
    assert (x.shape, x.dtype, factor) == ((5,), torch.float64, 3.0)
    assert inputs()[1] == 3.0


def test_every_op_comes_with_inputs_a_docstring_and_tolerances() -> None:
    for name in ir.ops.__all__:
        op = getattr(ir.ops, name)
        assert op.name == name
        assert inspect.getdoc(op.native)
        values = op.generate_inputs()
        assert len(op.bind(*values)) == len(op.schema.names)
        assert op.generate_inputs(num_tokens=3, dtype=torch.bfloat16) is not None
        op.get_tolerance(torch.float32)


# Rules: what they accept, and the reason that they give.


@pytest.mark.parametrize(
    "make",
    [
        rules.cpu,
        rules.contiguous,
        lambda: rules.dtype("x"),
        lambda: rules.ndim("x"),
        lambda: rules.one_of("factor"),
        lambda: rules.dtype("x", "float32"),  # type: ignore[arg-type]
        lambda: rules.ndim("x", "a"),  # type: ignore[arg-type]
        lambda: rules.last_dim_multiple_of("x", 0),
        lambda: rules.cpu("x") & (lambda x: True),  # type: ignore[operator]
        lambda: rules.cpu("x") | None,  # type: ignore[operator]
    ],
)
def test_a_rule_about_nothing_or_nonsense_is_refused(
    op: ir.IrOp, make: Callable[[], rules.Rule]
) -> None:
    with pytest.raises((PredicateSignatureError, TypeError)):
        op.register_impl("alpha", supports_args=make())(scaled)


RULES: list[tuple[rules.Rule, dict[str, Any], str | None]] = [
    (rules.dtype("x", torch.float32), {}, None),
    (rules.dtype("x", torch.float16, torch.bfloat16), {}, "float32 (supports float16, bfloat16)"),
    (rules.dtype("w", torch.float16), {}, None),  # None passes
    (rules.dtype("w", torch.float16), {"w": torch.ones(1)}, "w: float32"),
    (rules.same_dtype("x", "w"), {}, None),
    (rules.same_dtype("x", "w"), {"w": torch.ones(1).double()}, "float64"),
    (rules.same_dtype("w", "x", "y"), {"y": torch.ones(1).double()}, "float64"),
    (rules.same_shape("x", "y"), {}, None),
    (rules.same_shape("x", "y"), {"y": torch.ones(3)}, "(3,)"),
    (rules.same_device("x", "y"), {"y": torch.ones(2, 4, device="meta")}, "meta"),
    (rules.cpu("x", "w"), {}, None),
    (rules.cpu("x"), {"x": torch.ones(1, device="meta")}, "on meta (supports cpu)"),
    (rules.cuda("x"), {}, "on cpu (supports cuda)"),
    (rules.device("meta", "x"), {}, "supports meta"),
    (rules.has_values("x"), {}, None),
    (rules.has_values("x"), {"x": torch.ones(1, device="meta")}, "on meta (supports tensors with"),
    (rules.contiguous("x"), {"x": torch.ones(4, 2).t()}, "strides (1, 2)"),
    (rules.unit_stride("x"), {"x": torch.ones(4, 8)[:, :4]}, None),
    (rules.unit_stride("x"), {"x": torch.ones(4, 8)[:, ::2]}, "strides (8, 2)"),
    (rules.ndim("x", 1, 2), {}, None),
    (rules.ndim("x", 1, 3), {}, "2-d (supports 1 or 3-d)"),
    (rules.last_dim_multiple_of("x", 4), {}, None),
    (rules.last_dim_multiple_of("x", 3), {}, "multiples of 3"),
    (rules.last_dim_multiple_of("x", 1), {"x": torch.tensor(1.0)}, "multiples of 1"),
    (rules.is_none("w"), {}, None),
    (rules.is_none("w"), {"w": torch.ones(1)}, "w: a tensor (supports None)"),
    (rules.not_none("w"), {}, "w: None (supports a value)"),
    (rules.one_of("kind", "a", "b"), {}, None),
    (rules.one_of("kind", "b"), {}, "kind: 'a' (supports 'b')"),
    (rules.custom(lambda x, y, w=None, kind="a": kind == "a", "because"), {}, None),
    (rules.custom(lambda x, y, w=None, kind="a": kind == "b", "because"), {}, "because"),
    (rules.cpu("x") & rules.is_none("w") & rules.ndim("x", 1), {}, "2-d"),
    (rules.cuda("x") | rules.ndim("x", 2), {}, None),
    (rules.cuda("x") | rules.ndim("x", 1), {}, "x: on cpu (supports cuda) and x: 2-d"),
    ((rules.cuda("x") | rules.is_none("w")) & rules.ndim("y", 2), {}, None),
]


@pytest.mark.parametrize(("rule", "changes", "reason"), RULES)
def test_a_rule_accepts_or_gives_the_reason(
    registry: ir.Registry, rule: rules.Rule, changes: dict[str, Any], reason: str | None
) -> None:
    def ruled(x: Tensor, y: Tensor, w: Tensor | None = None, kind: str = "a") -> Tensor:
        return x + 0

    op = ir.register_op(ruled)
    op.register_impl("alpha", supports_args=rule)(ruled)
    op.set_default(["alpha"])
    arguments = {"x": torch.ones(2, 4), "y": torch.ones(2, 4), "w": None, "kind": "a", **changes}
    verdict = {v.provider: v for v in ir.explain(op, **arguments).verdicts}["alpha"]
    if reason is None:
        assert verdict.outcome == "chosen"
    else:
        assert verdict.outcome == "rejected"
        assert reason in verdict.reason

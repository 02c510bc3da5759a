"""What each layer of a module becomes: an op, implementations of it, and a layer or none."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field

from opweave import layers as own_layers
from opweave.cli.migration.providers import guess_provider
from opweave.cli.migration.reuse import changed_or_returned
from opweave.cli.migration.rewrite import Rewritten, bound_names, rewrite
from opweave.cli.migration.source import Function, LayerClass, Source, is_kernel, snake
from opweave.cli.migration.types import (
    Argument,
    annotation_of,
    attribute_type,
    returned,
    source_text,
)
from opweave.ir import current_registry

PLATFORM_METHODS = {
    "forward_cuda": "cuda",
    "forward_hip": "cuda",  # as torch calls ROCm's devices
    "forward_cpu": "cpu",
    "forward_xpu": "xpu",
    "forward_tpu": "xla",
    "forward_oot": "",
}


@dataclass
class OpPlan:
    """An op: a new one with its native implementation, or one that opweave has."""

    name: str
    arguments: list[Argument]
    returns: str
    native: Rewritten | None


@dataclass
class ImplPlan:
    """An implementation of an op."""

    provider: str
    method: str
    device: str
    body: Rewritten


@dataclass
class Plan:
    """What becomes of one class.

    Attributes:
        stays: whether a layer of this name is still needed.
        notes: what a person has to look at.
    """

    layer: LayerClass
    op: OpPlan | None = None
    impls: list[ImplPlan] = field(default_factory=list)
    stays: bool = True
    notes: list[str] = field(default_factory=list)


def plan(source: Source) -> list[Plan]:
    """Return the plan of every layer, in order."""
    plans: dict[str, Plan] = {}
    for layer in source.layers.values():
        made = Plan(layer)
        plans[layer.name] = made
        if layer.replaces is not None:
            _replacement(made, plans, source)
        elif layer.kind == "CustomOp":
            _custom_op(made, source)
    return list(plans.values())


def _custom_op(made: Plan, source: Source) -> None:
    layer = made.layer
    if layer.registered is None:
        made.notes.append(
            "It has no registered name, so custom_ops cannot speak of it. Register it, unless it "
            "is to follow its parent's name."
        )
    if layer.registered in own_layers.op_registry:
        made.stays = False
        made.notes.append(
            f"opweave has a layer of this name: {own_class(layer.registered)}. If it computes the "
            "same, use it; to change it, derive from it and register the class with register_oot. "
            "If not, keep this class under another name."
        )
    made.op = _op(made, source)
    if made.op is not None:
        _implementations(made, source, [name for name in PLATFORM_METHODS if name in layer.methods])


def _replacement(made: Plan, plans: dict[str, Plan], source: Source) -> None:
    layer = made.layer
    replaced = plans.get(layer.base)
    name = replaced.layer.registered if replaced else _own_name(layer.base, layer.replaces)
    op = replaced.op if replaced else _declared(name)
    if op is None:
        made.notes.append(
            f"It stays a replacement: what it replaces, {layer.replaces!r}, is no single op."
        )
        return
    made.op = OpPlan(op.name, op.arguments, op.returns, None)
    _implementations(made, source, [m for m in PLATFORM_METHODS if m in layer.methods])
    others = [m for m in layer.methods if m not in PLATFORM_METHODS and not _only_super(layer, m)]
    made.stays = bool(others) or not made.impls
    if others:
        made.notes.append(
            f"It stays a replacement as well, for what else it changes: {', '.join(others)}."
        )


def _op(made: Plan, source: Source) -> OpPlan | None:
    """Return the op that ``forward_native`` is, or None, and say in the notes why."""
    layer = made.layer
    native, name = layer.methods.get("forward_native"), layer.registered or snake(layer.name)
    if native is None:
        made.notes.append("It has no forward_native of its own, so there is nothing to declare.")
        return None
    problem = _no_function(native)
    if problem:
        made.notes.append(
            f"forward_native is no op: {problem}. Write one function for each form, with "
            "positional parameters and outputs that are always the same, and call them from it."
        )
        return None
    arguments = _arguments(native, layer, made.notes)
    body = rewrite(native, layer, {a.attribute: a.name for a in arguments if a.attribute})
    problems = list(body.problems)
    if (given := changed_or_returned(native)) is not None:
        problems.append(f"it writes to its argument {given}, or returns it")
    if problems:
        made.notes.append(f"forward_native is no op: {'; '.join(problems)}.")
        return None
    known = _declared(name)
    if known is not None:
        if {a.name for a in known.arguments if not a.default} <= {a.name for a in arguments}:
            made.notes.append(f"opweave has this op: ir.ops.{name}.")
            return known
        made.notes.append(
            f"opweave has another op of this name, ir.ops.{name}"
            f"({', '.join(a.name for a in known.arguments)}). Use it if it is the same function."
        )
        name = f"{snake(source.path.stem)}_{name}"
    return OpPlan(name, arguments, returned(native), body)


def _implementations(made: Plan, source: Source, methods: Iterable[str]) -> None:
    assert made.op is not None
    known = {argument.name for argument in made.op.arguments}
    for method in methods:
        function = made.layer.methods[method]
        if _delegates(function):
            continue
        by_attribute = {a.attribute or a.name: a.name for a in made.op.arguments}
        body = rewrite(function, made.layer, by_attribute)
        strange = [name for name in _parameter_names(function) if name not in known]
        problems = body.problems + [
            f"{name} is no argument of ir.ops.{made.op.name}" for name in strange
        ]
        if problems:
            made.notes.append(f"{method} needs a hand: {'; '.join(problems)}.")
            continue
        taken = {impl.provider for impl in made.impls}
        provider, device = guess_provider(function, body, source, PLATFORM_METHODS[method], taken)
        made.impls.append(ImplPlan(provider, method, device, body))


def _arguments(native: Function, layer: LayerClass, notes: list[str]) -> list[Argument]:
    """Return the op's arguments: those of the method, and after the required ones, attributes."""
    defaults = [None] * (len(native.args.args) - len(native.args.defaults)) + native.args.defaults
    own = [
        Argument(arg.arg, annotation_of(arg, default), ast.unparse(default) if default else None)
        for arg, default in list(zip(native.args.args, defaults, strict=True))[1:]
    ]
    methods = [layer.methods[name] for name in PLATFORM_METHODS if name in layer.methods]
    names = set().union(*map(bound_names, [native, *methods]))
    used = []
    for name in _used_attributes(native, layer):
        kind = attribute_type(name, layer)
        if kind is None:
            kind = "float"
            notes.append(f"The type of {name} is a guess: float.")
        argument = name
        while argument in names:
            argument += "_"
        used.append(Argument(argument, kind, None, name))
    required = [argument for argument in own if argument.default is None]
    return [*required, *used, *(argument for argument in own if argument.default is not None)]


def _used_attributes(native: Function, layer: LayerClass) -> list[str]:
    """Return the attributes of self that a method, or a static method it calls, reads."""
    found = {
        node.attr: None
        for node in ast.walk(native)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and node.attr in layer.attributes
    }
    return [name for name in found if not is_kernel(layer.attributes[name])]


def _no_function(native: Function) -> str:
    if native.args.vararg or native.args.kwarg:
        return "it takes *args or **kwargs"
    if native.args.kwonlyargs:
        return "it has keyword-only parameters"
    if native.decorator_list:
        return "it is decorated"
    if not returned(native):
        return "it returns a tensor or a tuple"
    return ""


def _declared(name: str | None) -> OpPlan | None:
    if name is None or name not in current_registry().ops:
        return None
    signature = inspect.signature(current_registry().op(name).native)
    arguments = [
        Argument(
            p.name, source_text(p.annotation), None if p.default is p.empty else repr(p.default)
        )
        for p in signature.parameters.values()
    ]
    return OpPlan(name, arguments, source_text(signature.return_annotation), None)


def _own_name(*keys: str | None) -> str | None:
    """Return the registered name of opweave's layer of that class name or registered name."""
    for name, layer in own_layers.op_registry.items():
        if name in keys or layer.__name__ in keys:
            return name
    return None


def own_class(name: str) -> str:
    """Return module and name of opweave's layer of that registered name."""
    layer = own_layers.op_registry[name]
    public = hasattr(own_layers, layer.__name__)
    return f"{'opweave.layers' if public else layer.__module__}.{layer.__name__}"


def _delegates(function: Function) -> bool:
    """Whether a method does nothing but call another ``forward_...`` of the object."""
    statements = [s for s in function.body if not _is_docstring(s)]
    if len(statements) != 1 or not isinstance(statements[0], ast.Return):
        return False
    call = statements[0].value
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr.startswith("forward_")
    )


def _only_super(layer: LayerClass, method: str) -> bool:
    """Whether ``__init__`` does nothing but call its parent's."""
    statements = [s for s in layer.methods[method].body if not _is_docstring(s)]
    return (
        method == "__init__"
        and len(statements) == 1
        and ast.unparse(statements[0]).startswith("super().__init__(")
    )


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _parameter_names(function: Function) -> list[str]:
    arguments = function.args
    given = [*arguments.args[1:], *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [argument.arg for argument in given if argument is not None]

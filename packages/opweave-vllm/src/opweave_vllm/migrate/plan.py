"""The plan for each layer of a module: an op, its implementations, and the remaining class."""

import ast
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import Parameter, signature

from opweave import layers as own_layers
from opweave_vllm.migrate import trees
from opweave_vllm.migrate.declare import (
    PLATFORM_METHODS,
    OpPlan,
    Rewritten,
    changed_or_returned,
    declare,
    declared,
    provider_name,
    rewrite,
    static_methods,
)
from opweave_vllm.migrate.registrations import mentions
from opweave_vllm.migrate.source import NATIVE, OOT, LayerClass, SourceModule, last_part
from opweave_vllm.migrate.trees import Function

# The provider and the device of the kernel that a method calls.


_DEVICES = {"torch_npu": "npu", "torch_xla": "xla", "torch_musa": "musa"}
_NO_PROVIDER = {
    *("torch", "typing", "math", "os", "functools", "collections", "opweave"),
    *("vllm", "aphrodite", "sglang"),
}


def _packages(function: Function, body: Rewritten, source: SourceModule) -> list[str]:
    """Return the packages and the namespaces of torch's ops that a method uses."""
    parts = [function, *(ast.parse(text) for text in body.replacements.values())]
    imports, used = source.imports | trees.imports_of(function), set(trees.names_in(*parts))
    names = [_provider_of(full) for name, full in imports.items() if name in used]
    attributes = [n for part in parts for n in ast.walk(part) if isinstance(n, ast.Attribute)]
    for op in [path for path in map(trees.dotted, attributes) if path.startswith("torch.ops.")]:
        namespace = op.split(".")[2]
        names.append("vllm_c" if namespace == "_C" else namespace.strip("_").lower())
    return [name for name in dict.fromkeys(names) if name and name not in _NO_PROVIDER]


def _provider_of(module: str) -> str:
    if trees.is_engine(module) and "._" in module:  # vllm._custom_ops, vllm._ipex_ops
        kind = module.split("._")[1].partition("_ops")[0]
        return "vllm_c" if kind == "custom" else kind
    return module.lstrip(".").partition(".")[0].lower()


# The plan for each layer of a module: an op, its implementations, and the remaining layer.


@dataclass
class ImplPlan:
    """An implementation of an op."""

    provider: str
    method: str
    device: str
    body: Rewritten


@dataclass
class LayerPlan:
    """The plan for one class.

    Attributes:
        stays: whether the layer is still needed.
        unchanged: platform methods that are not changed.
        is_unregistered: whether its registered name is that of a layer of opweave.
        notes: remarks for the user.
    """

    layer: LayerClass
    op: OpPlan | None = None
    impls: list[ImplPlan] = field(default_factory=list)
    stays: bool = True
    unchanged: list[str] = field(default_factory=list)
    is_unregistered: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def calls_op(self) -> bool:
        """Whether the methods of the class become calls of the op."""
        return self.op is not None and self.layer.replaces is None

    @property
    def is_converted(self) -> bool:
        """Whether the class became an op, implementations or a layer of opweave."""
        return not self.stays or bool(self.impls) or self.calls_op


def plan(source: SourceModule) -> list[LayerPlan]:
    """Return the plan of every layer, in order."""
    plans: dict[str, LayerPlan] = {}
    used = mentions(source.module, source.registrations)
    for layer in source.layers.values():
        layer_plan = LayerPlan(layer)
        plans[layer.name] = layer_plan
        if layer.replaces is not None:
            _replacement(layer_plan, plans, source, used)
        elif layer.kind == "CustomOp":
            _custom_op(layer_plan, source)
        if layer_plan.stays and layer.registered in own_layers.op_registry:
            layer_plan.is_unregistered = True
            layer_plan.notes.append(
                f"opweave registers {own_class(layer.registered)} as {layer.registered!r}, so this "
                "class is not registered. To replace it, derive from it and use register_oot."
            )
    return list(plans.values())


def _custom_op(plan: LayerPlan, source: SourceModule) -> None:
    layer = plan.layer
    if layer.registered is None:
        plan.notes.append(
            "It has no registered name, so custom_ops cannot select it. Register it, unless it "
            "uses its parent's name."
        )
    elif not layer.registered.isidentifier():
        plan.notes.append(
            f"{layer.registered!r} cannot name a layer: it should be an identifier, such as "
            "'rms_norm'. Rename it, so that custom_ops can select it."
        )
    plan.op = declare(layer, source, plan.notes)
    if plan.op is not None:
        _implementations(plan, source)
    name = layer.registered or ""
    is_own = name in own_layers.op_registry and plan.op and plan.op.native is None
    if is_own and (parameter := _other_parameter(layer, name)):
        plan.notes.append(f"{own_class(name)} does not replace it: it takes another {parameter}.")
    elif is_own:
        plan.stays = False
        plan.notes.append(
            f"opweave's layer of this name replaces it: {own_class(name)}. To change that, "
            "derive from it and register the class with register_oot."
        )
        if plan.unchanged:
            plan.notes.append(f"Not in the new module: {', '.join(plan.unchanged)}.")


def _replacement(
    plan: LayerPlan, plans: dict[str, LayerPlan], source: SourceModule, used: Counter[str]
) -> None:
    layer = plan.layer
    replaced = plans.get(layer.base)
    if layer.registered_in is not None:
        plan.notes.append(f"{layer.registered_in} registers it: adapt that file.")
    if layer.methods.keys() == layer.aliases.keys() == {OOT} and layer.target(OOT) != OOT:
        plan.stays = bool(used[layer.name])
        plan.notes.append(f"It only calls {layer.target(OOT)}, which opweave does without it.")
        return
    base = last_part(layer.base)
    name = replaced.layer.registered if replaced else _own_name(base, layer.replaces)
    op = replaced.op if replaced else declared(name)
    if op is None:
        plan.notes.append(
            f"It stays a replacement: {layer.replaces!r}, which it replaces, is not a single op."
        )
        return
    plan.op = OpPlan(op.name, op.arguments, op.returns, None)
    _implementations(plan, source)
    others = [m for m in layer.methods if m not in PLATFORM_METHODS and not _only_super(layer, m)]
    if others:
        plan.notes.append(
            f"It also stays a replacement, for its other changes: {', '.join(others)}."
        )
    elif plan.impls and used[layer.name]:
        plan.notes.append("It also stays a replacement, since the file uses the class.")
    plan.stays = bool(others or plan.unchanged or used[layer.name] or not plan.impls)


def _implementations(plan: LayerPlan, source: SourceModule) -> None:
    """Plan an implementation for each platform method, or note why it cannot be one."""
    layer = plan.layer
    defined = [name for name in PLATFORM_METHODS if name in layer.methods or name in layer.aliases]
    problems: dict[str, None] = {}
    for method in sorted(defined, key=layer.aliases.__contains__):
        target = layer.target(method)
        function = layer.methods.get(target)
        if function is None or target == NATIVE:
            continue
        body = _body(plan, function, source, method)
        if body.problems:
            problems[f"{target} needs manual work: {'; '.join(body.problems)}."] = None
            plan.unchanged.append(method)
        elif method == target or PLATFORM_METHODS.get(target) != PLATFORM_METHODS[method]:
            plan.impls.append(_impl(plan, method, body, source))
    plan.notes += problems
    for name in sorted(layer.assigned & PLATFORM_METHODS.keys()):
        plan.notes.append(f"{name} needs manual work: it is not a method of the class.")
        plan.unchanged.append(name)


def _impl(plan: LayerPlan, method: str, body: Rewritten, source: SourceModule) -> ImplPlan:
    """Return the implementation with that body, for the kernel that it calls.

    Its provider is the package or the torch op namespace that the method uses, else the module.
    """
    function = plan.layer.methods[body.method]
    packages = _packages(function, body, source)
    of_opweave = plan.op is not None and plan.op.native is None
    provider = provider_name(next(iter(packages), source.path.stem), of_opweave=of_opweave)
    if provider in {impl.provider for impl in plan.impls}:
        provider = f"{provider}_{method.removeprefix('forward_')}"
    devices = (_DEVICES[package] for package in packages if package in _DEVICES)
    device = PLATFORM_METHODS[method] or next(devices, "privateuseone")
    return ImplPlan(provider, method, device, body)


def _body(plan: LayerPlan, function: Function, source: SourceModule, method: str) -> Rewritten:
    """Return the body of the implementation for the platform of *method*, with its problems."""
    assert plan.op is not None
    names = {a.attribute or a.name: a.name for a in plan.op.arguments}
    native = deepcopy(plan.layer.methods.get(NATIVE))
    known = static_methods(plan.layer) if plan.op.native else {}
    if native is not None and plan.calls_op:
        known[NATIVE] = f"{source.ir}.ops.{plan.op.name}.native"
        if any(argument.attribute for argument in plan.op.arguments):
            native.args.args = [argument for argument, _ in trees.own_parameters(native)]
            native.body = ast.parse(f"return {known[NATIVE]}({plan.op.call()})").body
            known[NATIVE] = ast.unparse(native)
    body = rewrite(function, plan.layer, names, method, known)
    if (written := changed_or_returned(function)) is not None:
        body.problems.append(f"it writes to its argument {written}, or returns it")
    arguments = {argument.name: argument for argument in plan.op.arguments}
    pairs = trees.own_parameters(function, keywords=True)
    rest = (function.args.vararg, function.args.kwarg)
    pairs += [(parameter, None) for parameter in rest if parameter is not None]
    for parameter, default in pairs:
        name = parameter.arg
        if name not in arguments:
            body.problems.append(f"{name} is not an argument of ir.ops.{plan.op.name}")
        elif default is not None and ast.unparse(default) != arguments[name].default:
            body.problems.append(
                f"its default of {name} is {ast.unparse(default)}, but that of "
                f"ir.ops.{plan.op.name} {arguments[name].default or 'missing'}"
            )
    return body


def _own_name(*keys: str | None) -> str | None:
    """Return the registered name of opweave's layer with that class name or registered name."""
    for name, layer in own_layers.op_registry.items():
        if name in keys or layer.__name__ in keys:
            return name
    return None


def own_class(name: str) -> str:
    """Return the qualified name of opweave's layer with that registered name."""
    layer = own_layers.op_registry[name]
    public = layer.__name__ in own_layers.__all__
    return f"{'opweave.layers' if public else layer.__module__}.{layer.__name__}"


def _other_parameter(layer: LayerClass, name: str) -> str:
    """Return a parameter that opweave's layer *name* takes with another default, or ""."""
    parameters = signature(own_layers.op_registry[name]).parameters
    init = layer.methods.get("__init__")
    for parameter, value in trees.own_parameters(init, keywords=True) if init else ():
        default = ast.unparse(value) if value else repr(Parameter.empty)
        own = parameters.get(parameter.arg)
        if (own or value) and (own is None or repr(own.default) != default):
            return parameter.arg
    return ""


def _only_super(layer: LayerClass, method: str) -> bool:
    """Return whether *method* is an ``__init__`` that only forwards its arguments to its parent."""
    call = trees.only_call(layer.methods[method], ast.Expr)
    if method != "__init__" or call is None:
        return False
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    values = [arg.value if isinstance(arg, ast.Starred) else arg for arg in arguments]
    is_forwarding = all(isinstance(value, ast.Name) for value in values)
    return is_forwarding and ast.unparse(call.func) == "super().__init__"

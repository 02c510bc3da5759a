"""The module as it could be: ops, implementations, and the layers that are left."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable, Iterator
from textwrap import indent

from opweave import layers as own_layers
from opweave.cli.migration.plan import PLATFORM_METHODS, OpPlan, Plan, own_class
from opweave.cli.migration.source import (
    KINDS,
    Function,
    Source,
    is_kernel,
    is_registration,
    is_registration_call,
    last_name,
)


def sketch(source: Source, plans: Iterable[Plan]) -> str:
    """Return the whole module; what is no layer stays as it is."""
    by_name = {plan.layer.name: plan for plan in plans}
    helpers: dict[str, str] = {}
    imports, parts = _own_imports(by_name.values()), list[str]()
    found: list[ast.Import | ast.ImportFrom] = []
    for node in source.module.body:
        if isinstance(node, ast.ClassDef) and node.name in by_name:
            parts += _class_parts(by_name[node.name], helpers)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(node)
        elif not is_registration_call(node):
            parts.append(ast.unparse(node))
    docstring = [parts.pop(0)] if ast.get_docstring(source.module) else []
    body = "\n\n\n".join(parts)
    for node in found:
        imports += _import(node, body)
    header = "\n".join(dict.fromkeys(imports))
    return "\n\n".join([*docstring, "from __future__ import annotations", header, body]) + "\n"


def remaining_imports(text: str) -> list[str]:
    """Return the modules of vLLM's that a sketch still imports."""
    modules = [
        name
        for node in ast.walk(ast.parse(text))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    ]
    return sorted({name for name in modules if name.partition(".")[0] == "vllm"})


def _own_imports(plans: Iterable[Plan]) -> list[str]:
    plans = list(plans)
    imports = ["import torch", "from opweave import ir"]
    if any(plan.impls for plan in plans):
        imports.append("from opweave.ir import rules")
    kinds = {p.layer.kind or "CustomOp" for p in plans if p.stays}
    if kinds:
        imports.append(f"from opweave.layers import {', '.join(sorted(kinds))}")
    for plan in plans:
        if not plan.stays and plan.layer.registered in own_layers.op_registry:
            module, _, name = own_class(plan.layer.registered).rpartition(".")
            alias = "" if name == plan.layer.name else f" as {plan.layer.name}"
            imports.append(f"from {module} import {name}{alias}")
    return imports


def _class_parts(plan: Plan, helpers: dict[str, str]) -> Iterator[str]:
    op = plan.op
    bodies = [op.native] if op and op.native else []
    for body in [*bodies, *(impl.body for impl in plan.impls)]:
        for name, method in body.helpers.items():
            text = _as_function(name, method)
            if helpers.setdefault(name, text) == text:
                yield text
    if op and op.native:
        yield f"@ir.register_op(name={op.name!r})\n" + _function(
            op, f"_{op.name}", op.native.text()
        )
    for impl in plan.impls:
        assert op is not None
        tensors = [a.name for a in op.arguments if "Tensor" in a.annotation]
        rule = (
            f"rules.{impl.device}({', '.join(map(repr, tensors))})"
            if impl.device in ("cpu", "cuda")
            else f"rules.device({', '.join(map(repr, [impl.device, *tensors]))})"
        )
        yield (
            f"@ir.ops.{op.name}.register_impl({impl.provider!r}, supports_args={rule})\n"
            + _function(op, "_", impl.body.text())
        )
    if plan.stays:
        yield _layer(plan)


def _function(op: OpPlan, name: str, body: str) -> str:
    parameters = ", ".join(
        f"{a.name}: {a.annotation}" + (f" = {a.default}" if a.default is not None else "")
        for a in op.arguments
    )
    return f"def {name}({parameters}) -> {op.returns}:\n{indent(body, '    ')}"


def _as_function(name: str, method: Function) -> str:
    function = copy.deepcopy(method)
    function.name, function.decorator_list = name, []
    return ast.unparse(function)


def _layer(plan: Plan) -> str:
    """Return the class; its methods call the op, if there is one."""
    node, op = copy.deepcopy(plan.layer.node), plan.op
    if plan.layer.replaces and not any(map(is_registration, node.decorator_list)):
        text = f"{plan.layer.kind or 'CustomOp'}.register_oot({plan.layer.replaces!r})"
        node.decorator_list.append(ast.parse(text, mode="eval").body)
    if op is None or op.native is None:
        return ast.unparse(node)
    native = plan.layer.methods["forward_native"]
    hoisted = {method.name for method in op.native.helpers.values()}
    dropped = {impl.method for impl in plan.impls} | hoisted | {"forward_native"}
    delegating = {m for m in PLATFORM_METHODS if m in plan.layer.methods}
    kernels = {n for n, v in plan.layer.attributes.items() if is_kernel(v)}
    body = [
        _without(each, kernels)
        for each in node.body
        if not (isinstance(each, Function) and each.name in dropped | delegating)
    ]
    signature = ast.unparse(native.args)
    arrow = f" -> {ast.unparse(native.returns)}" if native.returns else ""
    given = ", ".join(f"self.{a.attribute}" if a.attribute else a.name for a in op.arguments)
    methods = (
        f"def forward_native({signature}){arrow}:\n    return ir.ops.{op.name}.native({given})\n"
        f"def forward_cuda({signature}){arrow}:\n    return ir.ops.{op.name}({given})\n"
        "forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda"
    )
    node.body = [each for each in body if each is not None] + ast.parse(methods).body
    return ast.unparse(node)


def _without(node: ast.stmt, attributes: set[str]) -> ast.stmt | None:
    """Return the statement without the assignments to these attributes of self."""
    if isinstance(node, ast.Assign) and any(
        isinstance(t, ast.Attribute) and last_name(t.value) == "self" and t.attr in attributes
        for t in node.targets
    ):
        return None
    for name in ("body", "orelse"):
        inner = [_without(each, attributes) for each in getattr(node, name, [])]
        if inner:
            setattr(node, name, [each for each in inner if each is not None])
    if isinstance(node, ast.If) and not node.body and not node.orelse:
        return None
    if isinstance(node, (ast.If, ast.FunctionDef)) and not node.body:
        node.body = [ast.Pass()]
    return node


def _import(node: ast.Import | ast.ImportFrom, body: str) -> list[str]:
    """Return an import; what opweave has too comes from there, and vLLM's only where it is used."""
    if isinstance(node, ast.Import) or (node.module or "").partition(".")[0] != "vllm":
        return [] if getattr(node, "module", "") == "__future__" else [ast.unparse(node)]
    imports = []
    for alias in node.names:
        used = re.search(rf"\b{alias.asname or alias.name}\b", body)
        if alias.name in KINDS or not used:
            continue
        module = "opweave.layers" if hasattr(own_layers, alias.name) else node.module
        imports.append(ast.unparse(ast.ImportFrom(module, [alias], 0)))
    return imports

"""The module as it could be: ops, implementations, and the layers that are left."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from textwrap import indent

from opweave import layers as own_layers
from opweave.cli.migration.declare import OpPlan
from opweave.cli.migration.imports import moved
from opweave.cli.migration.plan import Plan, own_class
from opweave.cli.migration.registrations import unregister
from opweave.cli.migration.source import KINDS, Source
from opweave.cli.migration.syntax import Function, dotted
from opweave.cli.migration.thin_layer import thin_layer


def sketch(source: Source, plans: Sequence[Plan]) -> str:
    """Return the whole module; what is no layer stays as it is."""
    by_name = {plan.layer.name: plan for plan in plans}
    ir = "ir" if source.imports.get("ir", "opweave.ir") == "opweave.ir" else "opweave_ir"
    module, registrations = copy.deepcopy((source.module, source.registrations))
    gone = {plan.layer.name for plan in plans if not plan.stays and plan.layer.replaces}
    unregister(module, registrations, gone)
    helpers: dict[str, str] = {}
    parts: list[str] = []
    imports: list[ast.Import | ast.ImportFrom] = []
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name in by_name:
            parts += _class_parts(by_name[node.name], helpers, ir)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        else:
            parts.append(ast.unparse(node))
    docstring = [parts.pop(0)] if ast.get_docstring(module) else []
    body = "\n\n\n".join(parts)
    used = set(re.findall(r"(?<![\w.])\w+", body))
    lines = _own_imports(plans, source, used, ir)
    for node in imports:
        lines += moved(node, used)
    header = "\n".join(dict.fromkeys(lines))
    return "\n\n".join([*docstring, "from __future__ import annotations", header, body]) + "\n"


def _own_imports(plans: Sequence[Plan], source: Source, used: set[str], ir: str) -> list[str]:
    imports = ["import torch"]
    if any(plan.op is not None for plan in plans):
        imports.append("from opweave import ir" + (f" as {ir}" if ir != "ir" else ""))
    if any(plan.impls for plan in plans):
        imports.append("from opweave.ir import rules")
    kinds = [kind for kind in KINDS if kind in used and kind not in source.imports]
    if kinds:
        imports.append(f"from opweave.layers import {', '.join(kinds)}")
    for plan in plans:
        if not plan.stays and plan.layer.registered in own_layers.op_registry:
            module, _, name = own_class(plan.layer.registered).rpartition(".")
            alias = "" if name == plan.layer.name else f" as {plan.layer.name}"
            imports.append(f"from {module} import {name}{alias}")
    return imports


def _class_parts(plan: Plan, helpers: dict[str, str], ir: str) -> Iterator[str]:
    op = plan.op
    bodies = [op.native] if op and op.native else []
    for body in [*bodies, *(impl.body for impl in plan.impls)]:
        for name, method in body.helpers.items():
            text = _as_function(name, method)
            if helpers.setdefault(name, text) == text:
                yield text
    if op and op.native:
        native = _function(op, f"_{op.name}", op.native.text())
        yield f"@{ir}.register_op(name={op.name!r})\n{native}"
    for impl in plan.impls:
        assert op is not None
        tensors = [a.name for a in op.arguments if "Tensor" in a.annotation]
        rule = (
            f"rules.{impl.device}({', '.join(map(repr, tensors))})"
            if impl.device in ("cpu", "cuda")
            else f"rules.device({', '.join(map(repr, [impl.device, *tensors]))})"
        )
        yield (
            f"@{ir}.ops.{op.name}.register_impl({impl.provider!r}, supports_args={rule})\n"
            + _function(op, "_", impl.body.text())
        )
    if plan.stays:
        yield thin_layer(plan, ir)


def _function(op: OpPlan, name: str, body: str) -> str:
    parameters = ", ".join(
        f"{a.name}: {a.annotation}" + (f" = {a.default}" if a.default is not None else "")
        for a in op.arguments
    )
    return f"def {name}({parameters}) -> {op.returns}:\n{indent(body, '    ')}"


def _as_function(name: str, method: Function) -> str:
    function = copy.deepcopy(method)
    function.name = name
    function.decorator_list = [d for d in function.decorator_list if dotted(d) != "staticmethod"]
    return ast.unparse(function)

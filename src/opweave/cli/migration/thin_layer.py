"""The class that is left of a layer: what it holds, and methods that call its op."""

from __future__ import annotations

import ast
import copy
from collections.abc import Set

from opweave.cli.migration.declare import PLATFORM_METHODS, OpPlan
from opweave.cli.migration.plan import Plan
from opweave.cli.migration.removal import without
from opweave.cli.migration.source import NATIVE, LayerClass
from opweave.cli.migration.syntax import Function, attribute_of_self, dotted

_CALLERS = [name for name in PLATFORM_METHODS if name != "forward_hip"]  # by default as on CUDA


def thin_layer(plan: Plan, ir: str) -> str:
    """Return the class; its methods call the op, if there is a new one. *ir* is opweave's."""
    node, op = copy.deepcopy(plan.layer.node), plan.op
    if op is None or op.native is None:
        return ast.unparse(node)
    functions = {method.name: name for name, method in op.native.helpers.items()}
    replaced = PLATFORM_METHODS.keys() - plan.kept
    body: list[ast.stmt] = []
    for each in node.body:
        name = each.name if isinstance(each, Function) else ""
        if name == NATIVE:
            body += _methods(plan, op, ir)
        elif name in functions:
            body += ast.parse(f"{name} = staticmethod({functions[name]})").body
        elif name not in replaced and not _is_alias(each, replaced):
            body.append(each)
    node.body = body
    needless = _needless_kernels(plan.layer, body)
    without(node, lambda each: _assigns(each, needless))
    return ast.unparse(node)


def _methods(plan: Plan, op: OpPlan, ir: str) -> list[ast.stmt]:
    native = plan.layer.methods[NATIVE]
    signature = ast.unparse(native.args)
    arrow = f" -> {ast.unparse(native.returns)}" if native.returns else ""
    given = ", ".join(f"self.{a.attribute}" if a.attribute else a.name for a in op.arguments)
    text = f"def {NATIVE}({signature}){arrow}:\n    return {ir}.ops.{op.name}.native({given})\n"
    callers = [name for name in _CALLERS if name not in plan.kept]
    if "forward_cuda" in plan.kept and "forward_hip" not in plan.kept:
        own = {*plan.layer.methods, *plan.layer.aliases}
        callers += ["forward_hip"] if "forward_hip" in own else []
    for first, *others in [callers] if callers else []:
        text += f"def {first}({signature}){arrow}:\n    return {ir}.ops.{op.name}({given})\n"
        text += f"{' = '.join([*others, first])}\n" if others else ""
    return ast.parse(text).body


def _needless_kernels(layer: LayerClass, body: list[ast.stmt]) -> set[str]:
    """Return the attributes that hold a kernel and that no method that is left reads."""
    read = {
        attribute_of_self(node)
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    return {name for name in layer.attributes if layer.kernel(name) is not None} - read


def _is_alias(node: ast.stmt, replaced: Set[str]) -> bool:
    """Say whether a statement assigns *replaced* methods only; else take those out of it."""
    if not isinstance(node, ast.Assign):
        return False
    node.targets = [each for each in node.targets if dotted(each) not in replaced]
    return not node.targets


def _assigns(node: ast.stmt, attributes: Set[str]) -> bool:
    """Say whether a statement assigns one of these attributes of self."""
    return isinstance(node, ast.Assign) and any(
        attribute_of_self(target) in attributes for target in node.targets
    )

"""The remaining class of a layer: parameters, and methods that call its op."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from typing import Any

import libcst as cst

from opweave_vllm.migrate.declare import PLATFORM_METHODS, OpPlan
from opweave_vllm.migrate.plan import LayerPlan
from opweave_vllm.migrate.source import NATIVE, LayerClass
from opweave_vllm.migrate.syntax import attribute_of_self
from opweave_vllm.migrate.trees import Statement, spaced, statement, target_name, without

# forward_hip is forward_cuda by default.
_CALLERS = [name for name in PLATFORM_METHODS if name != "forward_hip"]


def thin_layer(plan: LayerPlan, node: cst.ClassDef, ir: str) -> cst.ClassDef:
    """Return the class *node* with methods that call the op, if it is a new one.

    Args:
        plan: the plan of the class.
        node: the class.
        ir: the name of ``opweave.ir`` in the module.
    """
    op = plan.op
    if op is None or op.native is None:
        return node
    functions = {method.name: name for name, method in op.native.helpers.items()}
    replaced = PLATFORM_METHODS.keys() - plan.kept
    body: list[Statement] = []
    for each in node.body.body:
        if isinstance(each, cst.FunctionDef):
            name = each.name.value
            if name == NATIVE:
                body += _methods(plan, op, each, ir)
            elif name in functions:
                body.append(spaced(statement(f"{name} = staticmethod({functions[name]})"), 1))
            elif name not in replaced:
                body.append(each)
        elif (kept := _without_aliases(each, replaced)) is not None:
            body.append(kept)
    thin = node.with_changes(body=node.body.with_changes(body=body))
    needless = _needless_kernels(plan.layer, thin)
    return without(thin, lambda each: _assigns(each, needless))


def _methods(plan: LayerPlan, op: OpPlan, native: cst.FunctionDef, ir: str) -> Iterator[Statement]:
    given = ", ".join(f"self.{a.attribute}" if a.attribute else a.name for a in op.arguments)
    native = spaced(native, 1, [])
    yield native.with_changes(body=_block(f"return {ir}.ops.{op.name}.native({given})"))
    callers = [name for name in _CALLERS if name not in plan.kept]
    if "forward_cuda" in plan.kept and "forward_hip" not in plan.kept:
        own = {*plan.layer.methods, *plan.layer.aliases}
        callers += ["forward_hip"] if "forward_hip" in own else []
    for first, *others in [callers] if callers else []:
        body = _block(f"return {ir}.ops.{op.name}({given})")
        yield native.with_changes(name=cst.Name(first), body=body)
        if others:
            yield spaced(statement(" = ".join([*others, first])), 1)


def _block(text: str) -> cst.IndentedBlock:
    return cst.IndentedBlock([statement(text)])


def _needless_kernels(layer: LayerClass, node: cst.ClassDef) -> set[str]:
    """Return the attributes with kernels that the methods no longer call."""
    read = {
        attribute_of_self(part)
        for part in ast.walk(ast.parse(cst.Module([node]).code))
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load)
    }
    return {name for name in layer.attributes if layer.kernel(name) is not None} - read


def _without_aliases(node: Any, replaced: Set[str]) -> Any:
    """Return a statement without assignments of *replaced* methods, or None if none is left."""
    if not isinstance(node, cst.SimpleStatementLine):
        return node
    left = []
    for each in node.body:
        targets = each.targets if isinstance(each, cst.Assign) else ()
        kept = [target for target in targets if target_name(target) not in replaced]
        if kept or not targets:
            left.append(each.with_changes(targets=kept) if targets else each)
    return node.with_changes(body=left) if left else None


def _assigns(node: cst.CSTNode, attributes: Set[str]) -> bool:
    """Return whether a statement assigns one of these attributes of ``self``."""
    return isinstance(node, cst.Assign) and any(
        target_name(target) in {f"self.{name}" for name in attributes} for target in node.targets
    )

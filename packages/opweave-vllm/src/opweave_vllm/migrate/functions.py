"""Functions made from methods: ops, implementations and helpers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import libcst as cst
from libcst import matchers as m

from opweave_vllm.migrate.declare import OpPlan
from opweave_vllm.migrate.plan import LayerPlan
from opweave_vllm.migrate.trees import methods_of, spaced, statement

_WIDTH = 88  # longer signatures get a line per parameter


def functions(
    plan: LayerPlan, node: cst.ClassDef, helpers: set[str], ir: str, indent: str
) -> Iterator[cst.FunctionDef]:
    """Yield the functions made from the methods of a class.

    Args:
        plan: the plan of the class.
        node: the class.
        helpers: names of the helpers that exist already; new ones are added.
        ir: the name of ``opweave.ir`` in the module.
        indent: the indentation of one level.
    """
    op, methods = plan.op, methods_of(node)
    if op is None:
        return
    native = [op.native] if op.native else []
    for rewritten in [*native, *(impl.body for impl in plan.impls)]:
        for name in rewritten.helpers.keys() - helpers:
            helpers.add(name)
            yield _helper(name, methods[rewritten.helpers[name].name], indent)
    if op.native:
        decorator = f'@{ir}.register_op(name="{op.name}")'
        body = _body(methods[op.native.method], op.native.replacements, indent)
        yield _function(decorator, f"_{op.name}", op, methods[op.native.method], body)
    for impl in plan.impls:
        tensors = [a.name for a in op.arguments if "Tensor" in a.annotation]
        named = impl.device in ("cpu", "cuda")
        rule, given = (impl.device, tensors) if named else ("device", [impl.device, *tensors])
        quoted = ", ".join(f'"{each}"' for each in given)
        decorator = (
            f"@{ir}.ops.{op.name}.register_impl("
            f'"{impl.provider}", supports_args=rules.{rule}({quoted}))'
        )
        method = methods[impl.body.method]
        yield _function(decorator, "_", op, method, _body(method, impl.body.replacements, indent))


def documented(function: cst.FunctionDef, node: cst.ClassDef) -> cst.FunctionDef:
    """Return *function* with the docstring of the class, if it does not have one of its own."""
    docstring = _docstring(node.body)
    body = function.body
    if docstring is None or _docstring(body) or not isinstance(body, cst.IndentedBlock):
        return function
    docstring = docstring.with_changes(leading_lines=[])
    return function.with_changes(body=body.with_changes(body=[docstring, *body.body]))


def _function(
    decorator: str, name: str, op: OpPlan, method: cst.FunctionDef, body: cst.BaseSuite
) -> cst.FunctionDef:
    parameters = [
        f"{a.name}: {a.annotation}" + (f" = {a.default}" if a.default is not None else "")
        for a in op.arguments
    ]
    signature = f"def {name}({', '.join(parameters)}) -> {op.returns}:"
    if len(signature) > _WIDTH:
        lines = "".join(f"    {parameter},\n" for parameter in parameters)
        signature = f"def {name}(\n{lines}) -> {op.returns}:"
    node = cst.ensure_type(statement(f"{decorator}\n{signature}\n    pass\n"), cst.FunctionDef)
    return spaced(node.with_changes(body=body), 2, method.leading_lines)


def _helper(name: str, method: cst.FunctionDef, indent: str) -> cst.FunctionDef:
    decorators = [
        each
        for each in method.decorators
        if not (isinstance(each.decorator, cst.Name) and each.decorator.value == "staticmethod")
    ]
    return spaced(
        method.with_changes(
            name=cst.Name(name), decorators=decorators, body=_body(method, {}, indent)
        ),
        2,
    )


def _body(method: cst.FunctionDef, replacements: Mapping[str, str], indent: str) -> cst.BaseSuite:
    """Return the body of a method for a function at the top level."""
    body = cast(cst.BaseSuite, method.body.visit(_SelfReplacer(replacements)))
    docstring = _docstring(body)
    if docstring is None or not isinstance(body, cst.IndentedBlock):
        return body
    text = cst.ensure_type(cst.ensure_type(docstring.body[0], cst.Expr).value, cst.SimpleString)
    value = text.value.replace(f"\n{indent}", "\n")
    docstring = docstring.with_deep_changes(text, value=value)
    return body.with_changes(body=[docstring, *body.body[1:]])


def _docstring(body: cst.BaseSuite) -> cst.SimpleStatementLine | None:
    """Return the statement that is the docstring, if there is one."""
    for first in body.body[:1]:
        if m.matches(first, m.SimpleStatementLine([m.Expr(m.SimpleString()), m.ZeroOrMore()])):
            return cst.ensure_type(first, cst.SimpleStatementLine)
    return None


class _SelfReplacer(cst.CSTTransformer):
    """Replaces attributes of ``self``."""

    def __init__(self, replacements: Mapping[str, str]) -> None:
        super().__init__()
        self.replacements = replacements

    def leave_Attribute(  # noqa: N802 (libcst's name)
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        name, value = updated_node.attr.value, updated_node.value
        if not (isinstance(value, cst.Name) and value.value == "self"):
            return updated_node
        if name not in self.replacements:
            return updated_node
        replacement = cst.parse_expression(self.replacements[name])
        return replacement.with_changes(lpar=updated_node.lpar, rpar=updated_node.rpar)

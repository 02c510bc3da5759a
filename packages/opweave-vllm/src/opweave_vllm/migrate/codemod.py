"""The codemod: replaces each layer by its op, its implementations and the layer."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, cast

import libcst as cst
from libcst import matchers as m
from libcst.helpers import get_full_name_for_node

from opweave import layers as own_layers
from opweave_vllm.migrate import trees
from opweave_vllm.migrate.declare import PLATFORM_METHODS, OpPlan, Rewritten
from opweave_vllm.migrate.plan import LayerPlan, own_class
from opweave_vllm.migrate.registrations import unregister
from opweave_vllm.migrate.source import NATIVE, LayerClass, SourceModule
from opweave_vllm.migrate.trees import Statement

# Functions made from methods: ops, implementations and helpers.


_WIDTH = 88  # longer signatures get a line per parameter


def functions(
    plan: LayerPlan, node: cst.ClassDef, ir: str, indent: str
) -> Iterator[cst.FunctionDef]:
    """Yield the functions made from the methods of a class.

    Args:
        plan: the plan of the class.
        node: the class.
        ir: the name of ``opweave.ir`` in the module.
        indent: the indentation of one level.
    """
    op, methods = plan.op, trees.methods_of(node)
    if op is None:
        return
    if op.native:
        decorator = f'@{ir}.register_op(name="{op.name}")'
        body = _body(methods[op.native.method], op.native, indent)
        yield _function(decorator, f"_{op.name}", op, methods[op.native.method], body)
    for impl in plan.impls:
        tensors = [a.name for a in op.arguments if "Tensor" in a.annotation]
        has_rule = impl.device in ("cpu", "cuda")
        rule, names = (impl.device, tensors) if has_rule else ("device", [impl.device, *tensors])
        quoted = ", ".join(f'"{name}"' for name in names)
        decorator = (
            f"@{ir}.ops.{op.name}.register_impl("
            f'"{impl.provider}", supports_args=rules.{rule}({quoted}))'
        )
        method = methods[impl.body.method]
        yield _function(decorator, "_", op, method, _body(method, impl.body, indent))


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
    node = cst.ensure_type(
        trees.statement(f"{decorator}\n{signature}\n    pass\n"), cst.FunctionDef
    )
    return trees.spaced(node.with_changes(body=body), 2, method.leading_lines)


def _body(method: cst.FunctionDef, rewritten: Rewritten, indent: str) -> cst.BaseSuite:
    """Return the body of a method for a function at the top level."""
    body = cast(cst.BaseSuite, method.body.visit(_SelfReplacer(rewritten.replacements)))
    docstring = _docstring(body)
    prelude = map(trees.statement, rewritten.prelude)
    if docstring is None or not isinstance(body, cst.IndentedBlock):
        return body.with_changes(body=[*prelude, *body.body]) if rewritten.prelude else body
    text = cst.ensure_type(cst.ensure_type(docstring.body[0], cst.Expr).value, cst.SimpleString)
    value = text.value.replace(f"\n{indent}", "\n")
    docstring = docstring.with_deep_changes(text, value=value)
    return body.with_changes(body=[docstring, *prelude, *body.body[1:]])


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
        name = updated_node.attr.value
        if name not in self.replacements or not m.matches(updated_node.value, m.Name("self")):
            return updated_node
        replacement = cst.parse_expression(self.replacements[name])
        own, new = updated_node, replacement
        return new.with_changes(lpar=own.lpar or new.lpar, rpar=own.rpar or new.rpar)


# The remaining class of a layer: parameters, and methods that call its op.


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
    if op is None or not plan.calls_op:
        return node
    replaced = PLATFORM_METHODS.keys() - plan.unchanged
    body: list[Statement] = []
    for part in node.body.body:
        if isinstance(part, cst.FunctionDef):
            name = part.name.value
            if name == NATIVE:
                body += _methods(plan, op, part, ir)
            elif name not in replaced:
                body.append(part)
        elif (remaining := _without_aliases(part, replaced)) is not None:
            body.append(remaining)
    thin = node.with_changes(body=node.body.with_changes(body=body))
    needless = {f"self.{name}" for name in _needless_kernels(plan.layer, thin)}

    def is_needless(node: cst.CSTNode) -> bool:
        return isinstance(node, cst.Assign) and any(
            trees.target_name(target) in needless for target in node.targets
        )

    return trees.without(thin, is_needless)


def _methods(plan: LayerPlan, op: OpPlan, native: cst.FunctionDef, ir: str) -> Iterator[Statement]:
    arguments = op.call("self.")
    native = trees.spaced(native, 1, [])
    yield native.with_changes(body=_block(f"return {ir}.ops.{op.name}.native({arguments})"))
    methods = {*plan.layer.methods, *plan.layer.aliases}
    names = methods | vars(own_layers.CustomOp).keys()
    callers = [name for name in _CALLERS if name not in plan.unchanged and name in names]
    if "forward_cuda" in plan.unchanged and "forward_hip" not in plan.unchanged:
        callers += ["forward_hip"] if "forward_hip" in methods else []
    if callers:
        first, *others = callers
        body = _block(f"return {ir}.ops.{op.name}({arguments})")
        yield native.with_changes(name=cst.Name(first), body=body)
        if others:
            yield trees.spaced(trees.statement(" = ".join([*others, first])), 1)


def _block(text: str) -> cst.IndentedBlock:
    return cst.IndentedBlock([trees.statement(text)])


def _needless_kernels(layer: LayerClass, node: cst.ClassDef) -> set[str]:
    """Return the attributes with kernels that the methods no longer call."""
    read = {
        trees.attribute_of_self(part)
        for part in ast.walk(ast.parse(cst.Module([node]).code))
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load)
    }
    return set(filter(layer.is_kernel, layer.attributes)) - read


def _without_aliases(node: Any, replaced: Set[str]) -> Any:
    """Return a statement without assignments of *replaced* methods, or None if none is left."""
    if not isinstance(node, cst.SimpleStatementLine):
        return node
    remaining = []
    for part in node.body:
        targets = part.targets if isinstance(part, cst.Assign) else ()
        others = [target for target in targets if trees.target_name(target) not in replaced]
        if others or not targets:
            remaining.append(part.with_changes(targets=others) if targets else part)
    return node.with_changes(body=remaining) if remaining else None


# The new module.


_CODING = re.compile(r"#.*?coding[:=]")  # PEP 263
_IMPORTS = (cst.Import, cst.ImportFrom)


def migrated(source: SourceModule, plans: Sequence[LayerPlan]) -> str:
    """Return the text of the module with its layers migrated; all else stays as it is."""
    by_name = {plan.layer.name: plan for plan in plans}
    ir = source.ir
    gone = {plan.layer.name for plan in plans if not plan.stays and plan.layer.replaces}
    tree = unregister(source.tree, source.module, source.registrations, gone)
    body: list[Statement] = []
    for node in tree.body:
        if isinstance(node, cst.ClassDef) and node.name.value in by_name:
            plan = by_name[node.name.value]
            body += _migrated_class(plan, node, ir, tree.default_indent)
        else:
            body.append(node)
    used = _used_names([node for node in body if not _is_import(node)])
    body = list(_with_moved_imports(body, used))
    header = [  # without a declaration of the encoding, since the text is UTF-8 now
        line
        for i, line in enumerate(tree.header)
        if not (i < 2 and line.comment and _CODING.match(line.comment.value))
    ]
    imports = _new_imports(plans, source, used, ir)
    text: str = tree.with_changes(body=_with_imports(body, imports), header=header).code
    return text


def _migrated_class(
    plan: LayerPlan, node: cst.ClassDef, ir: str, indent: str
) -> Iterator[Statement]:
    parts = list(functions(plan, node, ir, indent))
    if plan.is_unregistered:
        node = node.with_changes(decorators=[d for d in node.decorators if not _registers(d)])
    if plan.stays:
        yield from parts
        yield trees.spaced(thin_layer(plan, node, ir), 2) if parts else node
    elif parts:  # the first has the class's comments and docstring
        comments = [*node.leading_lines, *trees.spaced(parts[0], 0).leading_lines]
        yield trees.spaced(documented(parts[0], node), 2, comments)
        yield from parts[1:]


def _registers(node: cst.Decorator) -> bool:
    is_call = isinstance(node.decorator, cst.Call)
    return is_call and (get_full_name_for_node(node.decorator) or "").endswith(".register")


def _with_moved_imports(body: Sequence[Statement], used: Set[str]) -> Iterator[Statement]:
    comments: list[cst.EmptyLine] = []  # above imports that were removed
    for node in body:
        line = node.with_changes(leading_lines=[*comments, *node.leading_lines])
        comments = []
        if not isinstance(line, cst.SimpleStatementLine):
            yield line
            continue
        parts = [part for small in line.body for part in trees.moved(small, used)]
        if len(parts) == len(line.body):
            yield line.with_changes(body=parts)
            continue
        comments = [] if parts else [above for above in line.leading_lines if above.comment]
        for part in parts:
            is_first, is_last = part is parts[0], part is parts[-1]
            yield cst.SimpleStatementLine(
                [part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)],
                line.leading_lines if is_first else (),
                line.trailing_whitespace if is_last else cst.TrailingWhitespace(),
            )


def _with_imports(body: Sequence[Statement], lines: Sequence[str]) -> list[Statement]:
    """Return *body* with the new imports *lines* after its first imports."""
    start = 1 if cst.Module(body[:1]).get_docstring() else 0
    end = next((i for i in range(start, len(body)) if not _is_import(body[i])), len(body))
    present = _bindings(cst.Module(body[start:end]).code)
    future, *others = [
        [] if _bindings(line) <= present else [trees.statement(line)] for line in lines
    ]
    imports = [*body[start:end], *(node for nodes in others for node in nodes)]
    if imports and (future or start == end == 1):  # a blank line before the first
        imports[0] = trees.spaced(imports[0], 1)
    if start:
        future = [trees.spaced(node, 1) for node in future]
    return [*body[:start], *future, *imports, *body[end:]]


def _new_imports(
    plans: Sequence[LayerPlan], source: SourceModule, used: Set[str], ir: str
) -> list[str]:
    imports = ["from __future__ import annotations"]
    if "torch" in used:
        imports.append("import torch")
    if any(plan.op is not None for plan in plans):
        imports.append("from opweave import ir" + (f" as {ir}" if ir != "ir" else ""))
    if any(plan.impls for plan in plans):
        imports.append("from opweave.ir import rules")
    bases = sorted({*trees.BASES.values()} & used)
    kinds = [kind for kind in bases if kind not in source.imports]
    if kinds:
        imports.append(f"from opweave.layers import {', '.join(kinds)}")
    for plan in plans:
        if not plan.stays and plan.layer.registered in own_layers.op_registry:
            module, _, name = own_class(plan.layer.registered).rpartition(".")
            alias = "" if name == plan.layer.name else f" as {plan.layer.name}"
            imports.append(f"from {module} import {name}{alias}")
    return imports


def _used_names(body: Sequence[Statement]) -> set[str]:
    """Return the names in the code and the strings of statements, but not in comments."""
    text = ast.unparse(ast.parse(cst.Module(body).code))
    return set(re.findall(r"(?<![\w.])\w+", text))


def _bindings(text: str) -> Set[tuple[str, str]]:
    return trees.imports_of(ast.parse(text)).items()


def _is_import(node: Statement) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and all(
        isinstance(each, _IMPORTS) for each in node.body
    )

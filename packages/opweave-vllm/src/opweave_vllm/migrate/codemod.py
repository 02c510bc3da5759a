"""The codemod: replaces each layer by its op, its implementations and the layer that is left."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence, Set

import libcst as cst
from libcst.helpers import get_full_name_for_node

from opweave import layers as own_layers
from opweave_vllm.migrate.functions import documented, functions
from opweave_vllm.migrate.imports import imports_of, moved
from opweave_vllm.migrate.plan import LayerPlan, own_class
from opweave_vllm.migrate.registrations import unregister
from opweave_vllm.migrate.source import KINDS, SourceModule
from opweave_vllm.migrate.thin_layer import thin_layer
from opweave_vllm.migrate.trees import Statement, spaced, statement

_CODING = re.compile(r"#.*?coding[:=]")  # PEP 263
_IMPORTS = (cst.Import, cst.ImportFrom)


def migrated(source: SourceModule, plans: Sequence[LayerPlan]) -> str:
    """Return the text of the module with its layers migrated; all else stays as it is."""
    by_name = {plan.layer.name: plan for plan in plans}
    ir = "ir" if source.imports.get("ir", "opweave.ir") == "opweave.ir" else "opweave_ir"
    gone = {plan.layer.name for plan in plans if not plan.stays and plan.layer.replaces}
    tree = unregister(source.tree, source.module, source.registrations, gone)
    helpers: set[str] = set()
    body: list[Statement] = []
    for node in tree.body:
        if isinstance(node, cst.ClassDef) and node.name.value in by_name:
            plan = by_name[node.name.value]
            body += _migrated_class(plan, node, helpers, ir, tree.default_indent)
        else:
            body.append(node)
    used = _used_names([each for each in body if not _is_import(each)])
    body = list(_with_moved_imports(body, used))
    header = [  # the text is UTF-8 now
        line
        for i, line in enumerate(tree.header)
        if not (i < 2 and line.comment and _CODING.match(line.comment.value))
    ]
    own = _own_imports(plans, source, used, ir)
    text: str = tree.with_changes(body=_with_own_imports(body, own), header=header).code
    return text


def _migrated_class(
    plan: LayerPlan, node: cst.ClassDef, helpers: set[str], ir: str, indent: str
) -> Iterator[Statement]:
    parts = list(functions(plan, node, helpers, ir, indent))
    if plan.is_unregistered:
        kept = [each for each in node.decorators if not _registers(each)]
        node = node.with_changes(decorators=kept)
    if plan.stays:
        yield from parts
        yield spaced(thin_layer(plan, node, ir), 2) if parts else node
    elif parts:  # the first has the class's comments and docstring
        comments = [*node.leading_lines, *spaced(parts[0], 0).leading_lines]
        yield spaced(documented(parts[0], node), 2, comments)
        yield from parts[1:]


def _registers(node: cst.Decorator) -> bool:
    is_call = isinstance(node.decorator, cst.Call)
    return is_call and (get_full_name_for_node(node.decorator) or "").endswith(".register")


def _with_moved_imports(body: Sequence[Statement], used: Set[str]) -> Iterator[Statement]:
    comments: list[cst.EmptyLine] = []  # of removed imports
    for each in body:
        line = each.with_changes(leading_lines=[*comments, *each.leading_lines])
        comments = []
        if not isinstance(line, cst.SimpleStatementLine):
            yield line
            continue
        parts = [part for statement in line.body for part in moved(statement, used)]
        if len(parts) == len(line.body):
            yield line.with_changes(body=parts)
            continue
        comments = [] if parts else [each for each in line.leading_lines if each.comment]
        for part in parts:
            is_first, is_last = part is parts[0], part is parts[-1]
            yield cst.SimpleStatementLine(
                [part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)],
                line.leading_lines if is_first else (),
                line.trailing_whitespace if is_last else cst.TrailingWhitespace(),
            )


def _with_own_imports(body: Sequence[Statement], own: Sequence[str]) -> list[Statement]:
    """Return *body* with opweave's imports after its first imports."""
    start = 1 if body and _is_docstring(body[0]) else 0
    end = next((i for i in range(start, len(body)) if not _is_import(body[i])), len(body))
    present = _bindings(cst.Module(body[start:end]).code)
    future, *others = [[statement(line)] if not _bindings(line) <= present else [] for line in own]
    imports = [*body[start:end], *(node for each in others for node in each)]
    if future:  # blank lines around it
        imports = [spaced(node, 1) if i == 0 else node for i, node in enumerate(imports)]
        future = [spaced(future[0], 1)] if start else future
    elif start == end and start:
        imports = [spaced(node, 1) if i == 0 else node for i, node in enumerate(imports)]
    return [*body[:start], *future, *imports, *body[end:]]


def _own_imports(
    plans: Sequence[LayerPlan], source: SourceModule, used: Set[str], ir: str
) -> list[str]:
    imports = ["from __future__ import annotations"]
    if "torch" in used:
        imports.append("import torch")
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


def _used_names(body: Sequence[Statement]) -> set[str]:
    """Return the names in the code and the strings of statements, but not in comments."""
    text = ast.unparse(ast.parse(cst.Module(body).code))
    return set(re.findall(r"(?<![\w.])\w+", text))


def _bindings(text: str) -> Set[tuple[str, str]]:
    return imports_of(ast.parse(text)).items()


def _is_import(node: Statement) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and all(
        isinstance(each, _IMPORTS) for each in node.body
    )


def _is_docstring(node: Statement) -> bool:
    return bool(cst.Module([node]).get_docstring())

"""Syntax trees, abstract and concrete, and the imports of a module."""

import ast
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from importlib import import_module
from importlib.util import find_spec
from typing import TypeAlias, TypeVar, cast

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider

from opweave import layers as own_layers

# Helpers for abstract syntax trees.


Function = ast.FunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def dotted(node: ast.expr) -> str:
    """Return the text of a dotted name such as ``a.b.c``, or "" for other expressions."""
    if isinstance(node, ast.Attribute):
        start = dotted(node.value)
        return start and f"{start}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.expr) -> str:
    """Return ``c`` for ``a.b.c``, or "" if it is not a dotted name."""
    return dotted(node).rpartition(".")[2]


def attribute_of_self(node: ast.AST) -> str:
    """Return ``a`` for ``self.a``, or "" for other expressions."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return ""


def is_op(value: ast.expr) -> bool:
    """Return whether *value* names an op, such as ``torch.ops._C.f`` or ``ipex_ops.f``."""
    return any(part.endswith("ops") for part in dotted(value).split(".")[:-1])


def bound(function: Function) -> set[str]:
    """Return the names that a function binds."""
    parts = list(ast.walk(function))
    stored = {n.id for n in parts if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    return stored | {part.arg for part in parts if isinstance(part, ast.arg)}


def annotation_text(annotation: ast.expr) -> str:
    """Return the source of an annotation, without quotes around it."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation)


def is_static(method: Function) -> bool:
    """Return whether a method is a static method."""
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in method.decorator_list)


def own_parameters(
    method: Function, *, keywords: bool = False
) -> list[tuple[ast.arg, ast.expr | None]]:
    """Return the parameters of a method without ``self``, with their defaults.

    Args:
        method: the method.
        keywords: include keyword-only parameters.
    """
    parameters = [*method.args.posonlyargs, *method.args.args]
    missing: list[ast.expr | None] = [None] * (len(parameters) - len(method.args.defaults))
    pairs = list(zip(parameters, [*missing, *method.args.defaults], strict=True))
    pairs = pairs if is_static(method) else pairs[1:]
    if keywords:
        pairs += zip(method.args.kwonlyargs, method.args.kw_defaults, strict=True)
    return pairs


def is_docstring(statement: ast.stmt) -> bool:
    """Return whether a statement is a docstring or another constant."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def only_call(
    function: Function, kind: type[ast.Return | ast.Expr] = ast.Return
) -> ast.Call | None:
    """Return the call that *function* consists of, besides a docstring, or None.

    Args:
        function: the function.
        kind: the statement with the call: a return, or an expression.
    """
    statements = [node for node in function.body if not is_docstring(node)]
    if len(statements) != 1 or not isinstance(statements[0], kind):
        return None
    value = statements[0].value
    return value if isinstance(value, ast.Call) else None


def assignment(node: ast.AST) -> tuple[list[ast.expr], ast.expr | None]:
    """Return the targets of an assignment, and its value; ``[], None`` for other nodes."""
    if isinstance(node, ast.Assign):
        return node.targets, node.value
    return ([node.target], node.value) if isinstance(node, ast.AnnAssign) else ([], None)


def names_in(*nodes: ast.AST) -> Iterator[str]:
    """Yield every occurrence of a name in *nodes*."""
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                yield part.id


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes in the body of *function*, without those of nested functions and classes."""
    waiting: deque[ast.AST] = deque(function.body)
    while waiting:
        node = waiting.popleft()
        yield node
        if not isinstance(node, _SCOPES):
            waiting.extend(ast.iter_child_nodes(node))


# Concrete syntax trees, which keep comments and formatting.


Position = tuple[int, int]  # line and column in characters
Statement: TypeAlias = cst.SimpleStatementLine | cst.BaseCompoundStatement
_Statement = TypeVar("_Statement", bound=Statement)


def positions_of(module: cst.Module) -> Mapping[cst.CSTNode, Position]:
    """Return where each node of *module* starts."""
    ranges = MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)
    return {node: (at.start.line, at.start.column) for node, at in ranges.items()}


def position(node: ast.stmt | ast.expr, lines: Sequence[str]) -> Position:
    """Return where an abstract node starts; Python counts columns in bytes."""
    line = lines[node.lineno - 1]
    return node.lineno, len(line.encode()[: node.col_offset].decode())


def methods_of(node: cst.ClassDef) -> dict[str, cst.FunctionDef]:
    """Return the functions that a class defines, by name."""
    return {part.name.value: part for part in node.body.body if isinstance(part, cst.FunctionDef)}


def target_name(target: cst.AssignTarget) -> str:
    """Return ``a.b`` for the target ``a.b``, and an empty string if it is not a dotted name."""
    node = target.target
    return get_full_name_for_node(node) or "" if isinstance(node, (cst.Name, cst.Attribute)) else ""


def statement(text: str) -> Statement:
    """Return the statement *text*."""
    return cst.parse_statement(text)


def spaced(
    node: _Statement, count: int, comments: Sequence[cst.EmptyLine] | None = None
) -> _Statement:
    """Return *node* after *count* blank lines and *comments*; None: after its own comments."""
    lines = list(node.leading_lines if comments is None else comments)
    while lines and lines[0].comment is None:
        lines.pop(0)
    lines = [*[cst.EmptyLine(indent=False)] * count, *lines]
    return cast(_Statement, node.with_changes(leading_lines=lines))


def without(node: _Statement, is_unwanted: Callable[[cst.CSTNode], bool]) -> _Statement:
    """Return *node* without the unwanted statements and without blocks that become empty.

    A function, a class, and a block with an ``else`` stay, with ``pass``.
    """
    return cast(_Statement, node.visit(Remover(is_unwanted)))


class Remover(cst.CSTTransformer):
    """Removes unwanted statements; see :func:`without`."""

    def __init__(self, is_unwanted: Callable[[cst.CSTNode], bool]) -> None:
        super().__init__()
        self.is_unwanted = is_unwanted

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNode]:
        """Return the node, or the request to remove it."""
        node = super().on_leave(original_node, updated_node)
        is_statement = isinstance(original_node, (cst.BaseSmallStatement, cst.For))
        is_unwanted = is_statement and self.is_unwanted(original_node)
        return cst.RemoveFromParent() if is_unwanted or _is_empty(node) else node


def _is_empty(node: object) -> bool:
    is_block = isinstance(node, (cst.If, cst.For, cst.With, cst.Else)) and not node.body.body
    return is_block and getattr(node, "orelse", None) is None


# The imports of a module, and those that replace them.


_VLLM_API = "opweave_vllm.vllm_api"
_ENGINES = ("vllm", "aphrodite", "sglang")  # aphrodite has vLLM's modules under its own name
LAYER_HOMES = (
    *("vllm.model_executor.", "aphrodite.model_executor.", "opweave.layers."),
    *("sglang.srt.layers.", "sglang.multimodal_gen.runtime.layers."),
)
# The base classes of layers, by their names in the engines.
BASES = {"CustomOp": "CustomOp", "PluggableLayer": "PluggableLayer", "MultiPlatformOp": "CustomOp"}


def imports_of(node: ast.AST) -> dict[str, str]:
    """Return the full name of every name that imports in *node* bind."""
    full_names = {}
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            for alias in part.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                full_names[alias.asname or name] = name
        elif isinstance(part, ast.ImportFrom):
            for alias in part.names:
                full = f"{'.' * part.level}{part.module or ''}.{alias.name}"
                full_names[alias.asname or alias.name] = full
    return full_names


def full_name(node: ast.expr, imports: Mapping[str, str]) -> str:
    """Return the dotted name *node*, with the full name of its imported first part."""
    first, dot, rest = dotted(node).partition(".")
    return imports.get(first, first) + dot + rest


def moved(node: cst.BaseSmallStatement, used: Set[str]) -> Sequence[cst.BaseSmallStatement]:
    """Return the imports that replace an import; of names from vLLM, only those *used*."""
    if isinstance(node, cst.Import):
        names = [_moved_module(alias) for alias in node.names]
        return [node.with_changes(names=names)]
    if not isinstance(node, cst.ImportFrom):
        return [node]
    module = get_full_name_for_node(node.module) or "" if node.module else ""
    if node.relative or not is_engine(module):
        return [node]
    if isinstance(node.names, cst.ImportStar):
        return [node.with_changes(module=cst.parse_expression(_home(module, "*")))]
    homes: dict[str, list[cst.ImportAlias]] = {}
    for alias in node.names:
        if (alias.evaluated_alias or alias.evaluated_name) in used:
            home = _home(module, alias.evaluated_name)
            homes.setdefault(home, []).append(_renamed(alias) if home != module else alias)
    if len(node.names) == sum(map(len, homes.values())) and len(homes) == 1:
        ((home, names),) = homes.items()
        return [node.with_changes(module=cst.parse_expression(home), names=names)]
    return [_from(home, names) for home, names in homes.items()]


def _renamed(alias: cst.ImportAlias) -> cst.ImportAlias:
    """Return the import of opweave's base class for that of SGLang's."""
    as_name = alias.asname or cst.AsName(cst.Name("MultiPlatformOp"))
    is_other = alias.evaluated_name != "MultiPlatformOp"
    return alias if is_other else alias.with_changes(name=cst.Name("CustomOp"), asname=as_name)


def _from(module: str, names: Sequence[cst.ImportAlias]) -> cst.ImportFrom:
    """Return a new import, without the commas of the old one."""
    plain = [alias.with_changes(comma=cst.MaybeSentinel.DEFAULT) for alias in names]
    home = cast(cst.Attribute | cst.Name, cst.parse_expression(module))
    return cst.ImportFrom(home, plain)


def _moved_module(alias: cst.ImportAlias) -> cst.ImportAlias:
    ours = _in_vllm_api(alias.evaluated_name) if alias.evaluated_alias else None
    return alias.with_changes(name=cst.parse_expression(ours)) if ours else alias


def remaining_imports(text: str) -> list[str]:
    """Return the engine's modules that the new text still imports."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules.append(node.module or "")
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return sorted(set(filter(is_engine, modules)))


def _home(module: str, name: str) -> str:
    """Return opweave's module that provides *name* of an engine's *module*, else *module*.

    Kernels stay the engine's: opweave's functions of these names call the ops.
    """
    is_layer = f"{module}.".startswith(LAYER_HOMES[:2]) and name in own_layers.__all__
    if is_layer or name in BASES:
        return "opweave.layers"
    ours = None if name == "_custom_ops" else _in_vllm_api(module)
    return ours if ours and name in getattr(import_module(ours), "__all__", ()) else module


def _in_vllm_api(module: str) -> str | None:
    """Return opweave's module with the names of vLLM's *module*, or None."""
    engine, dot, rest = module.partition(".")
    if engine not in _ENGINES[:2] or rest == "_custom_ops":
        return None
    ours = _VLLM_API + dot + rest
    try:
        return ours if find_spec(ours) else None
    except ModuleNotFoundError:  # a parent package is missing
        return None


def is_engine(module: str) -> bool:
    """Return whether a module belongs to one of the engines."""
    return module.partition(".")[0] in _ENGINES

"""The layers that a module defines, read from its syntax tree; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opweave.cli.errors import CliError

KINDS = ("CustomOp", "PluggableLayer")
Function = ast.FunctionDef


@dataclass
class LayerClass:
    """A class that is, by its bases or decorators, a layer.

    Attributes:
        base: the name of its first base.
        kind: ``CustomOp`` or ``PluggableLayer``, or None where only the base's module knows.
        registered: the name that it is registered under.
        replaces: the class name or registered name of what it replaces.
        attributes: what ``__init__`` assigns to ``self``, by name.
    """

    node: ast.ClassDef
    base: str
    kind: str | None
    registered: str | None
    replaces: str | None
    methods: dict[str, Function] = field(default_factory=dict)
    attributes: dict[str, ast.expr] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.node.name


@dataclass
class Source:
    """A module and its layers, in order; a layer's first base in the same file comes before it."""

    path: Path
    module: ast.Module
    layers: dict[str, LayerClass]


def read(path: Path) -> Source:
    """Read the module in file *path*.

    Raises:
        CliError: it cannot be read, is not Python, defines no layer, or two of one name.
    """
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(f"Cannot read {str(path)!r}: {error.strerror}.") from error
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        raise CliError(f"{str(path)!r} is not Python: {error}.") from error
    except (MemoryError, RecursionError) as error:
        raise CliError(f"{str(path)!r} is nested too deeply to be read.") from error
    names = dict(_constants(module))
    calls = dict(_replacements_by_call(module, names))
    layers: dict[str, LayerClass] = {}
    for node in module.body:
        if isinstance(node, ast.ClassDef) and (found := _layer(node, layers, calls, names)):
            if found.name in layers:
                raise CliError(
                    f"{str(path)!r} defines two layers called {found.name}, in lines "
                    f"{layers[found.name].node.lineno} and {node.lineno}. Rename one of them."
                )
            layers[found.name] = found
    if not layers:
        raise CliError(
            f"{str(path)!r} defines no layer: no class at its top level derives from CustomOp or "
            "PluggableLayer, or is registered."
        )
    return Source(path, module, layers)


def last_name(node: ast.expr) -> str:
    """Return ``c`` for ``a.b.c``, and an empty string for anything but a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def snake(name: str) -> str:
    """Return ``my_op`` for ``MyOp``, as an identifier."""
    letters = [f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name)]
    return "".join(c if c.isalnum() or c == "_" else "_" for c in "".join(letters))


def is_kernel(value: ast.expr) -> bool:
    """Say whether an attribute holds one of torch's ops, which a function can name itself."""
    return ast.unparse(value).startswith("torch.ops.")


def is_registration(decorator: ast.expr) -> bool:
    """Say whether a decorator is ``register`` or ``register_oot``, called or bare."""
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(target, ast.Attribute) and target.attr in ("register", "register_oot")


def is_registration_call(node: ast.AST) -> bool:
    """Say whether a statement, or a loop's body, calls ``register_oot`` on given classes."""
    return isinstance(node, (ast.Expr, ast.For)) and any(
        isinstance(part, ast.Call) and last_name(part.func) == "register_oot"
        for part in ast.walk(node)
    )


def _layer(
    node: ast.ClassDef,
    known: Mapping[str, LayerClass],
    calls: Mapping[str, str],
    names: Mapping[str, str],
) -> LayerClass | None:
    base = next(filter(None, map(last_name, node.bases)), "")
    kind = base if base in KINDS else known[base].kind if base in known else None
    registered, replaces = None, calls.get(node.name)
    decorators = [each for each in node.decorator_list if is_registration(each)]
    for decorator in decorators:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        assert isinstance(target, ast.Attribute)
        name = _name_argument(decorator, names) if isinstance(decorator, ast.Call) else None
        if target.attr == "register":
            registered = name
        else:
            replaces = name or last_name(target.value)
    if not (decorators or replaces or base in KINDS or base in known):
        return None
    layer = LayerClass(node, base, kind, registered, replaces)
    layer.methods = {each.name: each for each in node.body if isinstance(each, Function)}
    layer.attributes = dict(_attributes(layer.methods.get("__init__")))
    return layer


def _name_argument(call: ast.Call, names: Mapping[str, str]) -> str | None:
    given = [*call.args, *(each.value for each in call.keywords if each.arg in ("name", None))]
    return next(filter(None, (_string(each, names) for each in given)), None)


def _string(node: ast.expr, names: Mapping[str, str]) -> str | None:
    """Return the string that *node* is, or that the module's constant of that name is."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _constants(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and value of every string that the module assigns at its top level."""
    for node in module.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = _string(node.value, {})
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if value is not None:
                yield from ((t.id, value) for t in targets if isinstance(t, ast.Name))


def _attributes(init: Function | None) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(init) if init else ():
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value:
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and last_name(target.value) == "self":
                value = node.value  # type: ignore[attr-defined]
                yield target.attr, value


def _replacements_by_call(
    module: ast.Module, names: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Class and name of ``register_oot(_decorated_op_cls=..., name=...)``, in loops over a dict."""
    tables = {
        last_name(node.targets[0]): node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    for node in filter(is_registration_call, module.body):
        if isinstance(node, ast.For):
            table = next((tables[n.id] for n in ast.walk(node.iter) if _in(n, tables)), None)  # type: ignore[attr-defined]
            pairs = zip(table.keys, table.values, strict=True) if table else ()
            for key, value in pairs:
                replaced = _string(key, names) if key is not None else None
                if replaced is not None:
                    yield last_name(value), replaced
        else:
            call = next(n for n in ast.walk(node) if isinstance(n, ast.Call))
            classes = [*call.args, *(each.value for each in call.keywords)]
            name = _name_argument(call, names)
            cls = next(filter(None, map(last_name, classes)), "")
            if name and cls:
                yield cls, name


def _in(node: ast.AST, tables: dict[str, ast.Dict]) -> bool:
    return isinstance(node, ast.Name) and node.id in tables

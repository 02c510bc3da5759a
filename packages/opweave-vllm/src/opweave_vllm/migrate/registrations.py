"""Calls of ``register_oot`` in a module and in the other modules of its package."""

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import libcst as cst
from libcst.helpers import get_full_name_for_node

from opweave_vllm.migrate import trees
from opweave_vllm.migrate.trees import Remover

# Calls of ``register_oot``, for one class or in a loop over a dict of classes.


Strings = Mapping[str, str]


@dataclass
class Registration:
    """A statement that registers replacements.

    Attributes:
        classes: the names of the classes, and what each replaces if the file says so.
        tables: the assignments of the dict that a loop iterates over.
    """

    node: ast.Expr | ast.For
    classes: dict[str, str] = field(default_factory=dict)
    tables: list[ast.Assign] = field(default_factory=list)

    @property
    def statements(self) -> list[ast.stmt]:
        """The statements that only register classes."""
        if isinstance(self.node, ast.Expr):
            return [self.node]
        (first, *more) = self.node.body
        return [self.node, *self.tables] if not more and _registered(first) else []


def find_registrations(module: ast.Module, strings: Strings) -> list[Registration]:
    """Return the registrations anywhere in *module*; *strings* are its constants."""
    tables: dict[str, list[ast.Assign]] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            tables.setdefault(_name(node), []).append(node)
    return list(_find(module, tables, strings))


def mentions(module: ast.Module, registrations: Iterable[Registration]) -> Counter[str]:
    """Count each name in *module*, except in statements that only register classes."""
    statements = {
        id(statement): statement
        for registration in registrations
        for statement in registration.statements
    }
    return Counter(trees.names_in(module)) - Counter(trees.names_in(*statements.values()))


def unregister(
    tree: cst.Module, module: ast.Module, registrations: Iterable[Registration], gone: Set[str]
) -> cst.Module:
    """Return *tree* without the registrations of the classes that are *gone*."""
    registrations = list(registrations)
    used = mentions(module, registrations)
    dropped: list[ast.stmt] = []
    for registration in registrations:
        is_needed = any(
            used[_name(table)] or any(trees.last_name(v) not in gone for v in _dict(table).values)
            for table in registration.tables
        )
        if registration.classes and registration.classes.keys() <= gone and not is_needed:
            dropped += registration.statements
    tables = [_dict(table) for registration in registrations for table in registration.tables]
    lines, positions = tree.code.splitlines(), trees.positions_of(tree)
    statements = {trees.position(statement, lines) for statement in dropped}
    dicts = {trees.position(table, lines) for table in tables}

    class Unregister(Remover):
        def leave_Dict(  # noqa: N802 (libcst's name)
            self, original_node: cst.Dict, updated_node: cst.Dict
        ) -> cst.Dict:
            """Return a table without the classes that are gone."""
            if positions[original_node] not in dicts:
                return updated_node
            return _without(updated_node, lambda entry: _class_name(entry.value) in gone)

    return tree.visit(Unregister(lambda node: positions[node] in statements))


def _without(table: cst.Dict, is_gone: Callable[[cst.BaseDictElement], bool]) -> cst.Dict:
    """Return a table without some entries and the comments on and above their lines."""
    remaining: list[cst.BaseDictElement] = []
    opening, closing = table.lbrace, table.rbrace
    for element in table.elements:
        if not is_gone(element):
            remaining.append(element)
            continue
        before = remaining[-1].comma if remaining else opening
        if not isinstance(before, (cst.Comma, cst.LeftCurlyBrace)):
            continue
        if element is table.elements[-1]:
            space = before.whitespace_after
            if isinstance(space, cst.ParenthesizedWhitespace) and space.first_line.comment:
                space = _joined(space, closing.whitespace_before)
                closing = closing.with_changes(whitespace_before=space)
            if remaining:
                remaining[-1] = remaining[-1].with_changes(comma=element.comma)
            else:
                opening = cst.LeftCurlyBrace()
        elif isinstance(element.comma, cst.Comma):
            space = _joined(before.whitespace_after, element.comma.whitespace_after)
            if remaining:
                remaining[-1] = remaining[-1].with_deep_changes(before, whitespace_after=space)
            else:
                opening = opening.with_changes(whitespace_after=space)
    return table.with_changes(elements=remaining, lbrace=opening, rbrace=closing)


def _joined(
    before: cst.BaseParenthesizableWhitespace, after: cst.BaseParenthesizableWhitespace
) -> cst.BaseParenthesizableWhitespace:
    """Return the end of the line *before* an entry, then the lines *after* it."""
    if not isinstance(after, cst.ParenthesizedWhitespace):
        return before
    if not isinstance(before, cst.ParenthesizedWhitespace):
        return after
    return after.with_changes(first_line=before.first_line)


def _class_name(node: cst.BaseExpression) -> str:
    name = isinstance(node, (cst.Name, cst.Attribute)) and get_full_name_for_node(node)
    return name.rpartition(".")[2] if name else ""


def string(node: ast.expr, strings: Strings) -> str | None:
    """Return the value of a string literal or of a module constant, or None."""
    if isinstance(node, ast.Name):
        return strings.get(node.id)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def name_argument(call: ast.Call, strings: Strings) -> str | None:
    """Return the name argument of ``register`` or ``register_oot``, if it is known."""
    values = [*call.args, *(k.value for k in call.keywords if k.arg in ("name", None))]
    return next(filter(None, (string(value, strings) for value in values)), None)


def _find(
    node: ast.AST, tables: Mapping[str, list[ast.Assign]], strings: Strings
) -> Iterator[Registration]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.For) and _is_loop(child):
            registration = Registration(child)
            for name in trees.names_in(child.iter):
                for table in tables.get(name, ()):
                    registration.tables.append(table)
                    registration.classes |= classes_of(_dict(table), strings)
            yield registration
        elif isinstance(child, ast.Expr) and (name := _registered(child)):
            yield Registration(child, {name: _replaced(child.value, strings)})  # type: ignore[arg-type]
        elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _find(child, tables, strings)


def _registered(statement: ast.AST) -> str:
    """Return the name of the class in ``X.register_oot(cls, name=...)``, or ""."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="register_oot")) as call):
            classes = [*call.args, *(k.value for k in call.keywords if k.arg != "name")]
            return next(filter(None, map(trees.last_name, classes)), "")
    return ""


def _replaced(call: ast.Call, strings: Strings) -> str:
    """Return the name that the call replaces, or "" if it is computed."""
    if len(call.args) > 1 or any(keyword.arg == "name" for keyword in call.keywords):
        return name_argument(call, strings) or ""
    return trees.dotted(call.func).split(".")[-2]


def _is_loop(node: ast.For) -> bool:
    """Return whether a loop registers the classes that it iterates over."""
    targets = set(trees.names_in(node.target))
    return any(_registered(part) in targets for part in ast.walk(node))


def _dict(table: ast.Assign) -> ast.Dict:
    assert isinstance(table.value, ast.Dict)
    return table.value


def classes_of(table: ast.Dict, strings: Strings) -> dict[str, str]:
    """Return the classes in a table of replacements, and what each replaces."""
    pairs = zip(table.keys, table.values, strict=True)
    named = ((trees.last_name(value), key and string(key, strings)) for key, value in pairs)
    return {name: replaced for name, replaced in named if name and replaced}


def _name(table: ast.Assign) -> str:
    return trees.last_name(table.targets[0])


# Registrations of a module's classes in the other modules of its package.


@dataclass(frozen=True)
class Elsewhere:
    """A ``register_oot`` in another file.

    Attributes:
        replaces: the class name or registered name of the layer that is replaced.
        file: the other file.
    """

    replaces: str
    file: str


def registered_elsewhere(path: Path) -> dict[str, Elsewhere]:
    """Return the classes of the module *path* that its package registers in other files."""
    top = path.resolve().parent
    while (top / "__init__.py").exists():
        top = top.parent
    parts = path.resolve().with_suffix("").relative_to(top).parts
    if len(parts) == 1:  # not in a package
        return {}
    classes: dict[str, Elsewhere] = {}
    for other, module in _registering(top / parts[0]):
        if other == path.resolve():
            continue
        package = other.relative_to(top).parent.parts
        for name, replaces in _elsewhere_registered(module, package, ".".join(parts)):
            classes.setdefault(name, Elsewhere(replaces, str(other.relative_to(top))))
    return classes


@cache
def _registering(folder: Path) -> list[tuple[Path, ast.Module]]:
    """Return the modules below *folder* that register replacements."""
    modules = []
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        if b"register_oot" in content:
            with suppress(SyntaxError, ValueError):
                modules.append((path, ast.parse(content)))
    return modules


def _elsewhere_registered(
    module: ast.Module, package: tuple[str, ...], target: str
) -> Iterator[tuple[str, str]]:
    """Yield the classes of the module *target* that *module* registers, and what they replace."""
    imported = {name: _absolute(full, package) for name, full in trees.imports_of(module).items()}
    for registration in find_registrations(module, {}):
        tables = map(_name, registration.tables)
        added = {name: replaced for table in tables for name, replaced in _added(module, table)}
        classes = registration.classes | added
        for name, replaces in classes.items():
            home, _, original = imported.get(name, "").rpartition(".")
            if home == target and replaces:
                yield original, replaces


def _added(module: ast.Module, table: str) -> Iterator[tuple[str, str]]:
    """Yield the classes that are added to a table after its creation."""
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Attribute(attr="update", value=owner), args=entries):
                pass
            case ast.Assign(targets=[ast.Subscript(value=owner, slice=key), *_], value=value):
                entries = [ast.Dict([key], [value])]
            case _:
                continue
        if trees.last_name(owner) == table:
            for entry in entries:
                if isinstance(entry, ast.Dict):
                    yield from classes_of(entry, {}).items()


def _absolute(full: str, package: tuple[str, ...]) -> str:
    """Return the absolute name of an import in a module of *package*."""
    name = full.lstrip(".")
    level = len(full) - len(name)
    if not level:
        return full
    return ".".join([*package[: len(package) - level + 1], name])

"""Reads the layers of a module from its syntax tree, without importing it."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import filterfalse
from pathlib import Path

import libcst as cst

from opweave import layers as own_layers
from opweave.cli.output import CliError
from opweave_vllm.migrate import trees
from opweave_vllm.migrate.registrations import (
    Elsewhere,
    Registration,
    find_registrations,
    name_argument,
    registered_elsewhere,
    string,
)
from opweave_vllm.migrate.trees import Function

# Names that a class binds: aliases of its methods, and annotated attributes.


def assigned_names(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the names that a class assigns, with the value if it is a dotted name, else ""."""
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            value = trees.dotted(statement.value)
            yield from ((trees.dotted(target), value) for target in statement.targets)


def annotated_attributes(node: ast.ClassDef, init: Function | None) -> Iterator[tuple[str, str]]:
    """Yield the attributes that a class or its ``__init__`` annotates, with their types."""
    for part in [*node.body, *(ast.walk(init) if init else ())]:
        if isinstance(part, ast.AnnAssign):
            name = trees.attribute_of_self(part.target)
            if part in node.body and isinstance(part.target, ast.Name):
                name = part.target.id
            if name:
                yield name, trees.annotation_text(part.annotation)


def _delegate(function: Function, methods: Mapping[str, Function]) -> str:
    """Return the ``forward_...`` to which a method only forwards its arguments, or ""."""
    call = trees.only_call(function)
    called = trees.attribute_of_self(call.func) if call else ""
    if call is None or not called.startswith("forward_"):
        return ""
    passed = [*map(ast.unparse, call.args)]
    passed += [ast.unparse(k).removeprefix(f"{k.arg}=") for k in call.keywords]
    defaults = [] if function.args.vararg else _defaults(methods.get(called, function))
    is_forwarding = passed == _forwarding_arguments(function)
    return called if is_forwarding and _defaults(function) == defaults else ""


def _forwarding_arguments(function: Function) -> list[str]:
    """Return the parameters of a method, as arguments that forward them."""
    arguments = function.args
    names = [parameter.arg for parameter, _ in trees.own_parameters(function)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [parameter.arg for parameter in arguments.kwonlyargs]
    return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def _defaults(function: Function) -> list[str]:
    return list(map(ast.unparse, function.args.defaults))


# The values of attributes, which can depend on the platform.


Tests = tuple[tuple[ast.expr, bool], ...]  # the conditions of the blocks around a statement
_TAGS = {"cuda", "hip", "cpu", "xpu", "tpu", "npu", "musa", "hpu", "oot"}
_PLATFORMS = {tag: {tag} for tag in _TAGS} | {"cuda_alike": {"cuda", "hip"}, "rocm": {"hip"}}


def _attributes(
    nodes: Iterable[ast.AST], tests: Tests = ()
) -> Iterator[tuple[str, ast.expr, Tests]]:
    """Yield the attributes that statements assign, with the value and its conditions."""
    for node in nodes:
        targets, value = trees.assignment(node)
        if value is not None:
            yield from ((n, value, tests) for n in map(trees.attribute_of_self, targets) if n)
        if isinstance(node, ast.If):
            yield from _attributes(node.body, (*tests, (node.test, True)))
            yield from _attributes(node.orelse, (*tests, (node.test, False)))
        else:
            yield from _attributes(ast.iter_child_nodes(node), tests)


def _truth(test: ast.expr, platforms: Set[str], wanted: bool = True) -> bool | None:
    """Return whether a condition on the platform is as *wanted*, or None if that is unknown."""
    match test:
        case ast.BoolOp(op=operator, values=values):
            decisive = isinstance(operator, ast.Or) is wanted
            states = {_truth(value, platforms, wanted) for value in values}
            return decisive if decisive in states else None if None in states else not decisive
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _truth(operand, platforms, not wanted)
        case ast.Call(func=called, args=[]) | (ast.Name() as called):
            others = _PLATFORMS.get(trees.last_name(called).lstrip("_").removeprefix("is_"), _TAGS)
            if platforms <= others or not platforms & others:
                return None if others is _TAGS else bool(platforms & others) is wanted
    return None


# The layers of a module.


NATIVE, OOT = "forward_native", "forward_oot"


@dataclass
class LayerClass:
    """A class that is a layer, by its bases or decorators.

    Attributes:
        base: its first base that is a layer, else its first: a class of the file, or the full
            name of an imported one.
        kind: ``CustomOp`` or ``PluggableLayer``, or None if only the base's module knows.
        registered: the name that it is registered under.
        replaces: the class name or registered name of the layer that it replaces.
        registered_in: the other file that registers it as a replacement, if any.
        attributes: everything that ``__init__`` assigns to ``self``, by name.
        conditions: the conditions of those values.
        annotations: the types of attributes that the class or ``__init__`` annotates.
        aliases: names in the class that are aliases of a method, with that method.
        assigned: every other name that the class assigns.
        overridden: the methods that classes derived from it define.
    """

    node: ast.ClassDef
    base: str
    kind: str | None
    registered: str | None
    replaces: str | None
    methods: dict[str, Function] = field(default_factory=dict)
    attributes: dict[str, list[ast.expr]] = field(default_factory=dict)
    conditions: dict[ast.expr, Tests] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    assigned: set[str] = field(default_factory=set)
    overridden: set[str] = field(default_factory=set)
    registered_in: str | None = None

    @property
    def name(self) -> str:
        return self.node.name

    def is_kernel(self, attribute: str) -> bool:
        """Return whether an attribute only holds ops, such as ``torch.ops._C.f``, or None."""
        values = self.attributes.get(attribute, [])
        targets = [target for n in ast.walk(self.node) for target in trees.assignment(n)[0]]
        if not values or list(map(trees.attribute_of_self, targets)).count(attribute) > len(values):
            return False  # other methods assign it
        ops, bound = list(filterfalse(_is_none, values)), trees.bound(self.methods["__init__"])
        return bool(ops) and all(trees.is_op(v) and not bound & {*trees.names_in(v)} for v in ops)

    def kernel(self, attribute: str, method: str) -> ast.expr | None:
        """Return the op that an attribute holds where *method* runs, or None."""
        platforms = {method.removeprefix("forward_")} & _TAGS or _TAGS
        if method == "forward_cuda" and "forward_hip" not in {*self.methods, *self.aliases}:
            platforms |= {"hip"}
        values: list[ast.expr] = []
        for value in self.attributes[attribute] if self.is_kernel(attribute) else ():
            states = {_truth(t, platforms, wanted) for t, wanted in self.conditions[value]}
            if False not in states:
                values = [*(values if None in states else ()), value]
        different = list({ast.unparse(value): value for value in values}.values())
        if not 1 <= len(different) <= 2 or any(map(_is_none, values)):
            return None
        return self._choice(*different) if len(different) == 2 else different[0]

    def _choice(self, first: ast.expr, second: ast.expr) -> ast.expr | None:
        """Return the values of an ``if`` and its ``else`` as one expression, or None."""
        (test, wanted) = ((first, True), *self.conditions[first])[-1]
        if (test, not wanted) not in self.conditions[second]:
            return None
        init, test = self.methods["__init__"], deepcopy(test)
        targets = {trees.dotted(t) for n in ast.walk(init) for t in trees.assignment(n)[0]}
        for node in ast.walk(test):
            if isinstance(node, ast.Name) and node.id in trees.bound(init):
                stored = list(map(trees.dotted, self.attributes.get(node.id, ())))
                if stored != [node.id] or node.id in targets:
                    return None
                node.id = f"self.{node.id}"
        parts = map(ast.unparse, (first, test, second) if wanted else (second, test, first))
        return ast.parse("{} if {} else {}".format(*parts), mode="eval").body

    def target(self, method: str) -> str:
        """Return the method that runs when *method* is called, following aliases."""
        seen = set[str]()
        while method in self.aliases and method not in seen:
            seen.add(method)
            method = self.aliases[method]
        return method


@dataclass
class SourceModule:
    """A module and its layers, in order of definition.

    Attributes:
        tree: the module with its comments and formatting.
        imports: the full name of each imported name.
        notes: remarks on code that is not migrated.
    """

    path: Path
    module: ast.Module
    tree: cst.Module
    layers: dict[str, LayerClass]
    imports: dict[str, str]
    registrations: list[Registration]
    notes: list[str]

    @property
    def ir(self) -> str:
        """The name of ``opweave.ir`` in the new module."""
        return "ir" if self.imports.get("ir", "opweave.ir") == "opweave.ir" else "opweave_ir"


def read(path: Path) -> SourceModule:
    """Read the module in file *path*.

    Raises:
        CliError: the file cannot be read, is not Python, or defines no layer or two of one name.
    """
    module, tree = _parsed(path)
    imports = trees.imports_of(module)
    strings = dict(_strings(module))
    registrations = find_registrations(module, strings)
    reader = _ClassReader(imports, strings, registrations, registered_elsewhere(path))
    for node in module.body:
        if isinstance(node, ast.ClassDef) and (layer := reader.layer(node)):
            if layer.name in reader.layers:
                raise CliError(
                    f"{str(path)!r} defines two layers called {layer.name}, in lines "
                    f"{reader.layers[layer.name].node.lineno} and {node.lineno}. Rename one of "
                    "them."
                )
            reader.layers[layer.name] = layer
    layers = reader.layers
    if not layers:
        raise CliError(
            f"{str(path)!r} defines no layer: no class at its top level derives from "
            f"{', '.join(trees.BASES)} or a layer that opweave has, or is registered."
        )
    notes = [*_strangers(registrations, layers), *_nested(module, reader)]
    return SourceModule(path, module, tree, layers, imports, registrations, notes)


def _parsed(path: Path) -> tuple[ast.Module, cst.Module]:
    if path.suffix == ".ipynb":
        raise CliError(
            f"{str(path)!r} is a notebook. Export it as a script, and migrate that: "
            "jupyter nbconvert --to script."
        )
    try:
        text = path.read_bytes()
        return ast.parse(text, filename=str(path)), cst.parse_module(text)
    except OSError as error:
        raise CliError(f"Cannot read {str(path)!r}: {error.strerror}.") from error
    except cst.ParserSyntaxError as error:
        raise CliError(f"libcst cannot parse {str(path)!r}: {error.message}") from error
    except (SyntaxError, ValueError) as error:
        raise CliError(f"{str(path)!r} is not Python: {error}.") from error
    except (MemoryError, RecursionError) as error:
        raise CliError(f"{str(path)!r} is nested too deeply to be read.") from error


class _ClassReader:
    """Reads classes into *layers*."""

    def __init__(
        self,
        imports: Mapping[str, str],
        strings: Mapping[str, str],
        registrations: list[Registration],
        elsewhere: Mapping[str, Elsewhere],
    ) -> None:
        self.imports, self.strings, self.elsewhere = imports, strings, elsewhere
        self.replaced = {
            cls: name for entry in registrations for cls, name in entry.classes.items() if name
        }
        self.layers: dict[str, LayerClass] = {}

    def layer(self, node: ast.ClassDef) -> LayerClass | None:
        """Return the layer that a class defines, or None."""
        bases = list(filter(None, map(self._base, node.bases)))
        base = next((b for b in bases if b in self.layers or _kind(b)), (*bases, "")[0])
        kind = self.layers[base].kind if base in self.layers else _kind(base)
        registered, replaces = self._names(node)
        is_registered = replaces or any(map(self._is_registration, node.decorator_list))
        if not (is_registered or kind or base in self.layers):
            return None
        layer = LayerClass(node, base, kind, registered, replaces)
        layer.methods = {part.name: part for part in node.body if isinstance(part, Function)}
        if node.name in self.elsewhere and node.name not in self.replaced:
            layer.registered_in = self.elsewhere[node.name].file
        elif not is_registered and base not in self.layers and _only_computes(layer):
            layer.replaces = last_part(base)
        for name, value, tests in _attributes(filter(None, [layer.methods.get("__init__")])):
            layer.attributes.setdefault(name, []).append(value)
            layer.conditions[value] = tests
        layer.annotations = dict(annotated_attributes(node, layer.methods.get("__init__")))
        for assigned, method in assigned_names(node):
            if method in layer.methods:
                layer.aliases[assigned] = method
            else:
                layer.assigned.add(assigned)
        for name, function in layer.methods.items():
            if called := _delegate(function, layer.methods):
                layer.aliases[name] = called
        while parent := self.layers.get(base):
            parent.overridden |= layer.methods.keys()
            base = parent.base
        return layer

    def _names(self, node: ast.ClassDef) -> tuple[str | None, str | None]:
        """Return the registered name of a class, and the name of the layer that it replaces."""
        registered, replaces = None, self.replaced.get(node.name)
        if replaces is None and node.name in self.elsewhere:
            replaces = self.elsewhere[node.name].replaces
        for decorator in filter(self._is_registration, node.decorator_list):
            call = decorator if isinstance(decorator, ast.Call) else None
            target, name = decorator, None
            if call is not None:
                target, name = call.func, name_argument(call, self.strings)
            assert isinstance(target, ast.Attribute)
            if target.attr == "register":
                registered = name
            else:
                replaces = name or trees.last_name(target.value)
        return registered, replaces

    def _is_registration(self, decorator: ast.expr) -> bool:
        """Return whether a decorator is a layer's ``register`` or ``register_oot``.

        Other registries have a method ``register`` as well.
        """
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if not isinstance(target, ast.Attribute):
            return False
        owner = self._base(target.value)
        is_layer = owner in self.layers or _kind(owner) is not None
        return target.attr == "register_oot" or (target.attr == "register" and is_layer)

    def _base(self, node: ast.expr) -> str:
        name = trees.dotted(node)
        return name if name in self.layers else trees.full_name(node, self.imports)


def _kind(base: str) -> str | None:
    """Return the kind of a class by its base."""
    home, _, name = base.rpartition(".")
    if name in trees.BASES:
        return trees.BASES[name]
    if not f"{home}.".startswith(trees.LAYER_HOMES):
        return None  # another class of that name
    for layer in own_layers.op_registry.values():
        if layer.__name__ == name:
            return "CustomOp" if issubclass(layer, own_layers.CustomOp) else "PluggableLayer"
    return None


def _only_computes(layer: LayerClass) -> bool:
    """Return whether a class derives from a known layer and only changes how it computes."""
    names = layer.methods.keys() | layer.aliases.keys() | layer.assigned
    return layer.kind == "CustomOp" and last_part(layer.base) not in trees.BASES and names == {OOT}


def last_part(name: str) -> str:
    """Return ``c`` for ``a.b.c``."""
    return name.rpartition(".")[2]


def _strings(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield name and value of every string constant of the module."""
    for node in module.body:
        targets, value = trees.assignment(node)
        if value is not None and (text := string(value, {})) is not None:
            yield from ((t.id, text) for t in targets if isinstance(t, ast.Name))


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _strangers(
    registrations: list[Registration], layers: Mapping[str, LayerClass]
) -> Iterator[str]:
    """Note the registrations of classes that the file does not define."""
    for registration in registrations:
        others = [name for name in registration.classes if name not in layers]
        if others or not registration.classes:
            yield (
                f"Line {registration.node.lineno} registers {', '.join(others) or 'classes'}, not "
                "defined here at the top level. It stays as it is: migrate that module too."
            )


def _nested(module: ast.Module, reader: _ClassReader) -> Iterator[str]:
    """Note the layers that are inside a function, a class or a block."""
    top = set(module.body)
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node not in top and reader.layer(node):
            yield (
                f"Line {node.lineno} defines {node.name} inside something else. It stays as it is: "
                "move it to the top level to migrate it."
            )

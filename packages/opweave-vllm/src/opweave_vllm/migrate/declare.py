"""The op that is declared from a layer: its name, arguments, types and functions."""

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import torch

from opweave.conformance.compare import outputs_problem
from opweave.errors import described
from opweave.ir import current_registry
from opweave.ir.errors import InvalidNameError
from opweave.ir.schema import ADAPTERS, OWN_PROVIDERS, RESERVED_PROVIDERS, check_op_name
from opweave.tuning.cases import generated
from opweave_vllm.migrate import trees
from opweave_vllm.migrate.source import NATIVE, LayerClass, SourceModule
from opweave_vllm.migrate.trees import Function

# Valid names for ops and providers.


def snake(name: str) -> str:
    """Return ``my_op`` for ``MyOp``, and ``rms_norm`` for ``RMSNorm``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def op_name(text: str) -> str:
    """Return *text* as a valid op name."""
    name = _identifier(text)
    try:
        return check_op_name(name)
    except InvalidNameError:
        return f"{name}_op"


def provider_name(text: str, *, of_opweave: bool) -> str:
    """Return *text* as a valid provider name that opweave does not use, at all or for its ops."""
    name, adapters = _identifier(text), ADAPTERS if of_opweave else ()
    return f"my_{name}" if name in (*RESERVED_PROVIDERS, *OWN_PROVIDERS, *adapters) else name


def _identifier(text: str) -> str:
    name = re.sub(r"[^a-z0-9_]", "_", text.lower())
    return f"_{name}" if name[:1].isdigit() else name


# Detects methods that change or return their arguments, which ops may not.


_FUNCTIONS = frozenset({"torch", "F", "nn.functional", "torch.nn.functional"})
_MAY_SHARE = {  # methods whose result may share the tensor's memory
    *("T", "chunk", "contiguous", "data", "detach", "expand", "expand_as", "flatten", "float"),
    *("half", "mT", "narrow", "permute", "reshape", "select", "split", "squeeze", "t", "to"),
    *("transpose", "type", "type_as", "unbind", "unflatten", "unfold", "unsqueeze", "view"),
    "view_as",
}


def changed_or_returned(function: Function) -> str | None:
    """Return an argument that *function* changes in place or returns, or None.

    Possible views of an argument count as the argument. Names that are assigned twice are ignored:
    their value is unknown.
    """
    assigned = Counter(name for node in ast.walk(function) for name, _ in _assigned(node))
    arguments = {arg.arg for arg in function.args.args[1:]} - set(assigned)
    values = {
        name: value
        for node in trees.own_nodes(function)
        for name, value in _assigned(node)
        if assigned[name] == 1 and value is not None
    }
    outputs = (value for node in trees.own_nodes(function) for value in _outputs(node))
    owners = (name for value in outputs for name in _owners(value, values))
    return next((name for name in owners if name in arguments), None)


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that a statement assigns, and the value that each is a part of."""
    if isinstance(node, (ast.Assign, ast.For)):
        targets, value = (
            ([node.target], None) if isinstance(node, ast.For) else trees.assignment(node)
        )
        for target in targets:
            items = target.elts if isinstance(target, ast.Tuple) else [target]
            whole = None if isinstance(value, ast.Tuple) and len(items) > 1 else value
            yield from ((name, whole) for item in items for name in _names(item))
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        yield from ((name, node.value) for name in _names(node.target))


def _outputs(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a statement writes to or returns."""
    if isinstance(node, ast.Return) and node.value is not None:
        yield node.value
    elif isinstance(node, ast.AugAssign):
        yield _indexed(node.target)
    elif isinstance(node, ast.Assign):
        yield from (_indexed(part) for part in node.targets if isinstance(part, ast.Subscript))
    elif isinstance(node, ast.Call):
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        if "out" in options:
            yield options["out"]
        if "inplace" in options and ast.unparse(options["inplace"]) != "False":
            yield from node.args[:1]
        if isinstance(node.func, ast.Attribute) and _is_in_place(node.func.attr):
            yield _holder(node)


def _is_in_place(method: str) -> bool:
    return method.endswith("_") and not method.endswith("__")


def _holder(call: ast.Call) -> ast.expr:
    """Return ``x`` for ``x.t()`` and ``torch.t(x)``."""
    assert isinstance(call.func, ast.Attribute)
    is_function = trees.dotted(call.func.value) in _FUNCTIONS and call.args
    return call.args[0] if is_function else call.func.value


def _indexed(target: ast.expr) -> ast.expr:
    """Return ``x`` for ``x[0][1]``."""
    return _indexed(target.value) if isinstance(target, ast.Subscript) else target


def _owners(value: ast.expr, values: dict[str, ast.expr]) -> Iterator[str]:
    """Yield the names whose memory *value* may share, as in ``(a, b.view(-1))`` and ``a[0]``."""
    if isinstance(value, ast.Name):
        yield value.id
        if value.id in values:
            rest = {name: other for name, other in values.items() if name != value.id}
            yield from _owners(values[value.id], rest)
    for part in _sharing(value):
        yield from _owners(part, values)


def _sharing(value: ast.expr) -> list[ast.expr]:
    """Return the parts of an expression whose memory its result may share."""
    match value:
        case ast.Tuple():
            return value.elts
        case ast.IfExp():
            return [value.body, value.orelse]
        case ast.Subscript() if _is_view(value.slice):
            return [value.value]
        case ast.Attribute(attr=name) if name in _MAY_SHARE:
            return [value.value]
        case ast.Call(func=ast.Attribute(attr=name)) if name in _MAY_SHARE or _is_in_place(name):
            return [_holder(value)]
    return []


def _is_view(index: ast.expr) -> bool:
    """Return whether indexing a tensor gives a view: tensors as indices copy."""
    if isinstance(index, ast.Tuple):
        return all(map(_is_view, index.elts))
    return isinstance(index, (ast.Slice, ast.Constant, ast.UnaryOp))


def _names(value: ast.expr) -> Iterator[str]:
    """Yield the names in a target."""
    if isinstance(value, ast.Name):
        yield value.id
    elif isinstance(value, (ast.Tuple, ast.List)):
        for item in value.elts:
            yield from _names(item)


# Types of an op's arguments and outputs, inferred from the source.


TENSOR = "torch.Tensor"
_TENSOR_MAKERS = frozenset({"Parameter", "empty", "ones", "zeros", "tensor", "arange", "full"})
_RETURNS = {
    **dict.fromkeys(("int", "len", "round", "numel", "cdiv", "divide", "round_up"), "int"),
    **dict.fromkeys(("next_power_of_2", "get_tensor_model_parallel_world_size"), "int"),
    "get_tensor_model_parallel_rank": "int",
    "float": "float",
    **dict.fromkeys(("bool", "isinstance", "hasattr", "any", "all"), "bool"),
    "str": "str",
}
# Names by which models call their sizes and flags.
_COUNT = re.compile(
    r"^_?(n|num|max|min|top|total|tp|dp|ep|pp)_|^top_?k$"
    r"|(size|dim|dims|rank|heads|groups|experts|len|length|count|layers|blocks|idx|index|steps)$"
)
_FLAG = re.compile(r"^_?(is|has|use|uses|do|enable|should|with|need|needs)_")


@dataclass(frozen=True)
class Argument:
    """An argument of an op.

    Attributes:
        default: as source text, or None.
        attribute: the attribute of the layer that is passed for it.
        parameter: the parameter of ``forward_native`` that is passed for it.
    """

    name: str
    annotation: str
    default: str | None
    attribute: str | None = None
    parameter: str | None = None


def annotation_of(argument: ast.arg, default: ast.expr | None) -> str:
    """Return the annotation of a parameter, or a guess from its default."""
    if argument.annotation is not None:
        return trees.annotation_text(argument.annotation)
    if default is None:
        return TENSOR
    if isinstance(default, ast.Constant) and default.value is None:
        return f"{TENSOR} | None"
    return type(default.value).__name__ if isinstance(default, ast.Constant) else TENSOR


def source_text(annotation: object) -> str:
    """Return the source of an annotation, with ``torch.Tensor`` for ``Tensor``."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"(?<![.\w])Tensor\b", TENSOR, text)


def guessed_type(name: str, layer: LayerClass) -> str:
    """Return a guess for an attribute with an ambiguous type."""
    types = _Values(layer).of_attribute(name)
    kind = "int" if _COUNT.search(name) else "bool" if _FLAG.match(name) else "float"
    if types == {"None"}:
        kind = TENSOR
    return f"{kind} | None" if "None" in types else kind


def returned(function: Function) -> str:
    """Return the return annotation of a method, or a guess from its return statements."""
    if function.returns is not None:
        return trees.annotation_text(function.returns)
    (size,) = _sizes(function)
    return TENSOR if size == 1 else f"tuple[{', '.join([TENSOR] * size)}]"


def output_problem(function: Function) -> str:
    """Return why the results of a method cannot be outputs of an op, or ""."""
    sizes = _sizes(function)
    annotation = trees.annotation_text(function.returns) if function.returns else ""
    if sizes <= {0} or annotation == "None":
        return "it returns nothing"
    if 0 in sizes or re.search(r"\b(None|Optional)\b", annotation):
        return "one of its outputs may be None"
    if len(sizes) > 1 or "|" in annotation or "Union" in annotation:
        return "it returns a tensor or a tuple"
    return ""


class _Values:
    """The types of the values in ``__init__``."""

    def __init__(self, layer: LayerClass) -> None:
        self.layer = layer
        init = layer.methods.get("__init__")
        self.parameters = _parameter_types(init) if init else {}
        self.open: set[str] = set()  # attributes whose types are being determined

    def of_attribute(self, name: str) -> set[str | None]:
        """Return the types of the values that are assigned to ``self.name``."""
        if name in self.open:
            return {None}
        self.open.add(name)
        types = {self.type(value) for value in self.layer.attributes.get(name, ())}
        self.open.remove(name)
        return types

    def attribute_type(self, name: str) -> str | None:
        """Return the type of ``self.name``, or None if it is ambiguous."""
        return self.layer.annotations.get(name) or _joined(self.of_attribute(name))

    def type(self, value: ast.expr) -> str | None:
        """Return the type of an expression, or None if it is unknown."""
        match value:
            case ast.Name(id=name):
                return self.parameters.get(name)
            case ast.Constant(value=constant):
                return "None" if constant is None else type(constant).__name__
            case ast.Compare() | ast.UnaryOp(op=ast.Not()):
                return "bool"
            case ast.UnaryOp():
                return self.type(value.operand)
            case ast.BoolOp():
                return _joined({self.type(operand) for operand in value.values})
            case ast.IfExp():
                return _joined({self.type(value.body), self.type(value.orelse)})
            case ast.BinOp():
                return self._result(value)
            case ast.Call():
                return self._returned(value)
            case ast.Subscript():  # x.shape[0]
                return "int" if trees.last_name(value.value) == "shape" else None
        return self.attribute_type(trees.attribute_of_self(value))

    def _result(self, value: ast.BinOp) -> str | None:
        sides = {self.type(value.left), self.type(value.right)}
        if not sides <= {"int", "float", "bool"}:
            return None
        if isinstance(value.op, (ast.Div, ast.Pow)):
            return "float" if isinstance(value.op, ast.Div) or "float" in sides else None
        return "float" if "float" in sides else "int"

    def _returned(self, value: ast.Call) -> str | None:
        called = trees.last_name(value.func)
        if called in _TENSOR_MAKERS or trees.is_op(value.func):
            return TENSOR
        if called in ("max", "min", "abs") and isinstance(value.func, ast.Name):
            return _joined({self.type(argument) for argument in value.args})
        return _RETURNS.get(called)


def _parameter_types(init: Function) -> dict[str, str]:
    """Return the types of parameters by their annotations, else by their defaults."""
    types: dict[str, str] = {}
    for argument, default in trees.own_parameters(init, keywords=True):
        if argument.annotation is not None:
            types[argument.arg] = trees.annotation_text(argument.annotation)
        elif isinstance(default, ast.Constant) and default.value is not None:
            types[argument.arg] = type(default.value).__name__
    return types


def _joined(types: set[str | None]) -> str | None:
    """Return the union of types, or None if it is ambiguous."""
    if len(types) == 1 and types != {"None"}:
        return next(iter(types))
    parts = {part for kind in types if kind is not None for part in kind.split(" | ")}
    if None in types or len(parts - {"None"}) != 1:
        return None
    (kind,) = parts - {"None"}
    return f"{kind} | None" if "None" in parts else kind


def _sizes(function: Function) -> set[int]:
    """Return the possible numbers of results of a method; 0 stands for None."""
    sizes = set()
    for node in trees.own_nodes(function):
        match node:
            case ast.Return(value=None | ast.Constant(value=None)):
                sizes.add(0)
            case ast.Return(value=ast.Tuple(elts=parts)):
                sizes.add(len(parts))
            case ast.Return():
                sizes.add(1)
    return sizes


# Turns a method into a function: attributes of ``self`` become arguments.


@dataclass
class Rewritten:
    """A method as a function without ``self``.

    Attributes:
        method: its name.
        replacements: the source text to write for attributes of ``self``, by attribute.
        prelude: statements to write first: imports of ``__init__``, and methods as functions.
        problems: why it cannot become a function.
    """

    method: str
    replacements: dict[str, str] = field(default_factory=dict)
    prelude: dict[str, None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def rewrite(
    function: Function,
    layer: LayerClass,
    arguments: Mapping[str, str],
    caller: str = NATIVE,
    known: Mapping[str, str] = MappingProxyType({}),
) -> Rewritten:
    """Return how *function* reads with *arguments* instead of the attributes of ``self``.

    Args:
        caller: the method whose platform it runs on.
        known: the functions that replace methods, by definition or name; "" for none.
    """
    rewritten = Rewritten(function.name)
    reader = _BodyReader(layer, arguments, rewritten, caller, {**known, function.name: ""})
    for statement in function.body:
        reader.visit(statement)
    rewritten.problems += _hidden(function, reader.replaced, set(arguments.values()))
    functions = {n for n, text in rewritten.replacements.items() if text == n} - {*arguments}
    rewritten.problems += [f"self.{n} hides another {n}" for n in functions & used_names(function)]
    rewritten.problems = list(dict.fromkeys(rewritten.problems))
    return rewritten


def static_methods(layer: LayerClass) -> dict[str, str]:
    """Return how functions call the static methods of a class that stays."""
    names = {name for name, method in layer.methods.items() if trees.is_static(method)}
    names -= PLATFORM_METHODS.keys() | layer.overridden
    return {name: f"{layer.name}.{name}" for name in names}


def used_names(function: Function) -> set[str]:
    """Return the names that *function*, or a function in it, reads or binds."""
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return names | trees.bound(function)


def _hidden(function: Function, replaced: set[str], arguments: set[str]) -> list[str]:
    """Return the names that would change their meaning in a function of these arguments."""
    bound = trees.bound(function)
    globals_ = (used_names(function) - bound) & arguments
    return [f"its own {name} would hide an argument" for name in sorted(replaced & bound)] + [
        f"an argument would hide the {name} that it reads" for name in sorted(globals_)
    ]


@dataclass
class _BodyReader(ast.NodeVisitor):
    layer: LayerClass
    arguments: Mapping[str, str]
    rewritten: Rewritten
    caller: str
    known: Mapping[str, str]
    replaced: set[str] = field(default_factory=set)  # the arguments that are used
    called: set[str] = field(default_factory=set)

    def visit_Call(self, node: ast.Call) -> None:
        self.called.add(trees.attribute_of_self(node.func))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = trees.attribute_of_self(node)
        if not name:
            self.generic_visit(node)
        elif isinstance(node.ctx, ast.Store):
            self._problem(f"it assigns self.{name}")
        elif name in self.arguments:
            self.replaced.add(self.arguments[name])
            self.rewritten.replacements[name] = self.arguments[name]
        elif (kernel := self.layer.kernel(name, self.caller)) is not None:
            self.visit(kernel)
            text = ast.unparse(_ArgumentReplacer(self.arguments).visit(deepcopy(kernel)))
            self.rewritten.replacements[name] = f"({text})" if " " in text else text
            for part in ast.walk(self.layer.methods["__init__"]):
                is_import = isinstance(part, (ast.Import, ast.ImportFrom))
                if is_import and trees.imports_of(part).keys() & set(trees.names_in(kernel)):
                    self.rewritten.prelude[ast.unparse(part)] = None
        elif text := self._function(name):
            is_name = not text.startswith("def ")
            self.rewritten.replacements[name] = text if is_name else name
            self.rewritten.prelude |= {} if is_name else {text: None}
        else:
            is_called = name in self.called or name in self.layer.methods
            self._problem(f"it {'calls' if is_called else 'reads'} self.{name}")

    def _function(self, name: str) -> str:
        """Return a function for a method, by its definition or name; "" for an attribute."""
        method = deepcopy(self.layer.methods.get(name))
        if method is None or name in self.known or name in PLATFORM_METHODS:
            return self.known.get(name, "")
        body = rewrite(method, self.layer, self.arguments, self.caller, self.known)
        is_static = trees.is_static(method)
        is_plain = is_static or not (method.decorator_list or changed_or_returned(method))
        if body.problems or not is_plain or name in self.layer.overridden:
            return ""
        self.replaced |= set(self.arguments.values()) & set(body.replacements.values())
        if not is_static:
            (method.args.posonlyargs or method.args.args).pop(0)
        return ast.unparse(_definition(method, body))

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in ("self", "super"):
            self._problem(f"it uses {node.id} as a whole")

    def _problem(self, text: str) -> None:
        self.rewritten.problems.append(text)


# The op that is declared from a layer's ``forward_native``.


PLATFORM_METHODS = {
    "forward_cuda": "cuda",
    "forward_hip": "cuda",  # torch's name for ROCm devices
    "forward_cpu": "cpu",
    "forward_xpu": "xpu",
    "forward_tpu": "xla",
    "forward_npu": "npu",
    "forward_musa": "musa",
    "forward_hpu": "hpu",
    "forward_oot": "",
}

# The words of the annotations that torch.library.infer_schema supports.
_TYPES = {
    *("torch", "Tensor", "dtype", "device", "int", "float", "bool", "str", "None"),
    *("Optional", "Union", "list", "List", "Sequence", "typing", "collections", "abc"),
}


@dataclass
class OpPlan:
    """A new op with its native implementation, or an existing op of opweave."""

    name: str
    arguments: list[Argument]
    returns: str
    native: Rewritten | None

    def call(self, owner: str = "") -> str:
        """Return the arguments of a call, with the attributes of *owner* or as arguments."""
        texts: list[str] = []
        for argument in self.arguments:
            attribute = f"{owner}{argument.attribute}" if owner else argument.name
            value = attribute if argument.attribute else argument.parameter
            is_keyword = len(texts) < self.arguments.index(argument)
            texts += [f"{argument.name}={value}" if is_keyword else value] if value else []
        return ", ".join(texts)


def declare(layer: LayerClass, source: SourceModule, notes: list[str]) -> OpPlan | None:
    """Return the op for ``forward_native``, or None with the reason in *notes*."""
    native = layer.methods.get(NATIVE)
    if native is None:
        notes.append("It does not define forward_native, so there is no op to declare.")
        return None
    call = trees.only_call(native)
    called_op = re.search(r"\bops\.(\w+)\.native$", trees.dotted(call.func) if call else "")
    if called_op:  # it was migrated before
        notes.append(f"Its op is ir.ops.{called_op[1]} already.")
        return None
    if problem := _no_function(native):
        notes.append(
            f"forward_native is not an op: {problem}. Write one function per form, with "
            "positional parameters and fixed outputs, and call them from it."
        )
        return None
    guesses: list[str] = []
    arguments = _arguments(native, layer, guesses)
    attributes = {a.attribute: a.name for a in arguments if a.attribute}
    body = rewrite(native, layer, attributes)
    problems = [*_unsupported(arguments), *body.problems]
    if NATIVE in layer.overridden:
        problems.append("another class of the file overrides it")
    if (argument := changed_or_returned(native)) is not None:
        problems.append(f"it writes to its argument {argument}, or returns it")
    if problems:
        notes.append(f"forward_native is not an op: {'; '.join(problems)}.")
        return None
    notes += guesses
    if native.returns is None:
        notes.append(f"The return type is a guess: {returned(native)}.")
    layer_name = layer.registered or snake(layer.name)
    name = op_name(layer_name)
    if name != layer_name:
        notes.append(f"Its op is called {name}: {layer_name!r} is not a valid op name.")
    own, existing = OpPlan(name, arguments, returned(native), body), declared(name)
    if existing is not None:
        names = _parameters(own, existing)
        difference = _difference(own, names, name, layer, source.module)
        if not difference:
            notes.append(f"ir.ops.{name} of opweave computes the same on drawn inputs.")
            same = {names[a.name]: (a.attribute, a.parameter) for a in arguments}
            existing.arguments = [
                Argument(a.name, a.annotation, a.default, *same.get(a.name, ()))
                for a in existing.arguments
            ]
            return existing
        notes.append(
            f"opweave has another op of this name, ir.ops.{name}"
            f"({', '.join(a.name for a in existing.arguments)}): {difference}."
        )
        own.name = op_name(f"{snake(source.path.stem)}_{name}")
    own.native = rewrite(native, layer, attributes, NATIVE, static_methods(layer))
    return own


def declared(name: str | None) -> OpPlan | None:
    """Return opweave's op of that name, or None."""
    if name is None or name not in current_registry().ops:
        return None
    signature = inspect.signature(current_registry().op(name).native)
    arguments = [
        Argument(
            p.name, source_text(p.annotation), None if p.default is p.empty else repr(p.default)
        )
        for p in signature.parameters.values()
    ]
    return OpPlan(name, arguments, source_text(signature.return_annotation), None)


def _no_function(native: Function) -> str:
    if native.args.vararg or native.args.kwarg:
        return "it takes *args or **kwargs"
    if native.args.kwonlyargs or native.args.posonlyargs:
        return "it has keyword-only or positional-only parameters"
    if native.decorator_list and not trees.is_static(native):
        return "it is decorated"
    return output_problem(native)


def _arguments(native: Function, layer: LayerClass, notes: list[str]) -> list[Argument]:
    """Return the op's arguments: the method's, with the attributes after the required ones."""
    parameters = [
        Argument(arg.arg, annotation_of(arg, d), ast.unparse(d) if d else None, None, arg.arg)
        for arg, d in trees.own_parameters(native)
    ]
    methods = [layer.methods[name] for name in PLATFORM_METHODS if name in layer.methods]
    names = set().union(*map(used_names, [*_with_helpers(native, layer), *methods]))
    attributes = []
    for name in _used_attributes(native, layer):
        kind = _Values(layer).attribute_type(name)
        if kind is None:
            kind = guessed_type(name, layer)
            notes.append(f"The type of {name} is a guess: {kind}.")
        argument = name
        while argument in names:
            argument += "_"
        attributes.append(Argument(argument, kind, None, name))
    required = [parameter for parameter in parameters if parameter.default is None]
    optional = [parameter for parameter in parameters if parameter.default is not None]
    return [*required, *attributes, *optional]


def _unsupported(arguments: Sequence[Argument]) -> Iterator[str]:
    """Yield why arguments have types that torch ops do not have."""
    for argument in arguments:
        if not set(re.findall(r"\w+", argument.annotation)) <= _TYPES:
            yield f"the type of {argument.name} is {argument.annotation}"


def _with_helpers(function: Function, layer: LayerClass) -> list[Function]:
    """Return *function* and the methods of the class that it uses, but for those of platforms."""
    functions = [function]
    for current in functions:
        for name in map(trees.attribute_of_self, ast.walk(current)):
            method = layer.methods.get(name)
            if method and method not in functions and name not in PLATFORM_METHODS:
                functions.append(method)
    return functions


def _used_attributes(native: Function, layer: LayerClass) -> list[str]:
    """Return the attributes of ``self`` that a method uses as values.

    Attributes that it calls are not values, nor are objects of which it reads a part, except for
    tensors.
    """
    nodes = [n for function in _with_helpers(native, layer) for n in ast.walk(function)]
    opened = {
        trees.attribute_of_self(node.func if isinstance(node, ast.Call) else node.value)
        for node in nodes
        if isinstance(node, (ast.Call, ast.Attribute, ast.Subscript))
    }
    read = dict.fromkeys(map(trees.attribute_of_self, nodes))
    return [
        name
        for name in read
        if name in layer.attributes
        and not layer.is_kernel(name)
        and (name not in opened or _Values(layer).attribute_type(name) is not None)
    ]


# Compares the function of a class with an op of opweave by value.
#
# The module is not imported: only the statements run that the function needs.


_TOKENS = (1, 5)
_SAFE_IMPORTS = frozenset({"torch", *sys.stdlib_module_names})


def _parameters(own: OpPlan, other: OpPlan) -> dict[str, str]:
    """Return the parameter of another op for each argument, by name, else by order; {}: none."""
    names = {argument.name: argument.attribute or argument.name for argument in own.arguments}
    rest = [a.name for a in other.arguments if not a.default and a.name not in names.values()]
    known = {argument.name for argument in other.arguments}
    others = [name for name, original in names.items() if original not in known]
    return names | dict(zip(others, rest, strict=True)) if len(rest) == len(others) else {}


def _difference(
    own: OpPlan, names: Mapping[str, str], name: str, layer: LayerClass, module: ast.Module
) -> str:
    """Return how a class's function differs from opweave's op *name* on drawn inputs, or ""."""
    if not names:
        return "it has other arguments"
    op = current_registry().op(name)
    try:
        function = _compiled(own, layer, module)
        for dtype in (torch.float32, torch.bfloat16):
            for sized in generated(op, _TOKENS, dtype=dtype):
                values = dict(zip(op.schema.names, sized.case.values, strict=True))
                result = function(**{name: values[other] for name, other in names.items()})
                if problem := outputs_problem(sized.case, result):
                    return f"it computes something else: {problem}"
    except Exception as error:
        return f"it cannot be compared, {described(error, 1)}"
    return ""


def _compiled(own: OpPlan, layer: LayerClass, module: ast.Module) -> Callable[..., Any]:
    """Return ``forward_native`` as a function of the arguments of its op."""
    assert own.native is not None
    parameters = [a.name if a.default is None else f"{a.name}={a.default}" for a in own.arguments]
    native = _definition(layer.methods[NATIVE], own.native)
    native.args = cast(Function, ast.parse(f"def f({', '.join(parameters)}): 0").body[0]).args
    tree = ast.Module([native], [])
    tree.body = [*_needed_by(tree, module), native]
    namespace: dict[str, Any] = {}
    tree.body.insert(0, *ast.parse("from __future__ import annotations").body)
    exec(compile(ast.fix_missing_locations(tree), "<migrate>", "exec"), namespace)
    return cast("Callable[..., Any]", namespace[NATIVE])


def _needed_by(tree: ast.Module, module: ast.Module) -> list[ast.stmt]:
    """Return the imports, constants and functions of *module* that *tree* needs."""
    names, needed = set(trees.names_in(tree)), set[ast.stmt]()
    while added := {s for s in module.body if s not in needed and _binds(s) & names}:
        needed |= added
        names |= set(trees.names_in(*added))
    return [statement for statement in module.body if statement in needed]


def _binds(statement: ast.stmt) -> set[str]:
    """Return the names that an import of torch, an assignment or a function binds."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        full_names = trees.imports_of(statement)
        return {n for n, full in full_names.items() if full.partition(".")[0] in _SAFE_IMPORTS}
    if isinstance(statement, Function):
        return {statement.name}
    return {trees.dotted(target) for target in trees.assignment(statement)[0]}


def _definition(method: Function, body: Rewritten) -> Function:
    """Return a method as a function that captures the arguments in its body."""
    function, replacer = deepcopy(method), _ArgumentReplacer(body.replacements)
    prelude = ast.parse("\n".join(body.prelude)).body
    function.body = [*prelude, *map(replacer.visit, function.body)]
    function.name, function.decorator_list = body.method, []
    return function


class _ArgumentReplacer(ast.NodeTransformer):
    def __init__(self, replacements: Mapping[str, str]) -> None:
        self.replacements = replacements

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        text = self.replacements.get(trees.attribute_of_self(node))
        return ast.parse(text, mode="eval").body if text else self.generic_visit(node)

"""Types of an op's arguments and outputs, inferred from the source."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass

from opweave_vllm.migrate.source import LayerClass
from opweave_vllm.migrate.syntax import (
    Function,
    annotation_text,
    attribute_of_self,
    is_torch_op,
    last_name,
    own_nodes,
    own_parameters,
)

TENSOR = "torch.Tensor"
_TENSOR_MAKERS = frozenset({"Parameter", "empty", "ones", "zeros", "tensor", "arange", "full"})
_RETURNS = {
    **dict.fromkeys(
        ("int", "len", "round", "cdiv", "divide", "round_up", "next_power_of_2"), "int"
    ),
    **dict.fromkeys(("numel", "get_tensor_model_parallel_world_size"), "int"),
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
    """

    name: str
    annotation: str
    default: str | None
    attribute: str | None = None


def annotation_of(argument: ast.arg, default: ast.expr | None) -> str:
    """Return the annotation of a parameter, or a guess from its default."""
    if argument.annotation is not None:
        return annotation_text(argument.annotation)
    if default is None:
        return TENSOR
    if isinstance(default, ast.Constant) and default.value is None:
        return f"{TENSOR} | None"
    return type(default.value).__name__ if isinstance(default, ast.Constant) else TENSOR


def source_text(annotation: object) -> str:
    """Return the source of an annotation, with ``torch.Tensor`` for ``Tensor``."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"(?<![.\w])Tensor\b", TENSOR, text)


def attribute_type(name: str, layer: LayerClass) -> str | None:
    """Return the type of ``self.name`` by its annotation or its values, or None if ambiguous."""
    return layer.annotations.get(name) or _joined(_types(name, layer))


def guessed_type(name: str, layer: LayerClass) -> str:
    """Return a guess for an attribute with an ambiguous type."""
    types = _types(name, layer)
    kind = TENSOR if types == {"None"} else _kind_by_name(name)
    return f"{kind} | None" if "None" in types else kind


def _kind_by_name(name: str) -> str:
    if _COUNT.search(name):
        return "int"
    return "bool" if _FLAG.match(name) else "float"


def returned(function: Function) -> str:
    """Return the return annotation of a method, or a guess from its return statements."""
    if function.returns is not None:
        return annotation_text(function.returns)
    (size,) = _sizes(function)
    return TENSOR if size == 1 else f"tuple[{', '.join([TENSOR] * size)}]"


def output_problem(function: Function) -> str:
    """Return why the results of a method cannot be outputs of an op, or ""."""
    sizes = _sizes(function)
    given = annotation_text(function.returns) if function.returns else ""
    if sizes <= {0} or given == "None":
        return "it returns nothing"
    if 0 in sizes or re.search(r"\b(None|Optional)\b", given):
        return "one of its outputs may be None"
    if len(sizes) > 1 or "|" in given or "Union" in given:
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
        found = {self.type(value) for value in self.layer.attributes[name]}
        self.open.remove(name)
        return found

    def type(self, value: ast.expr) -> str | None:
        """Return the type of an expression, or None if it is unknown."""
        if isinstance(value, ast.Name):
            return self.parameters.get(value.id)
        if isinstance(value, ast.Constant):
            return type(value.value).__name__ if value.value is not None else "None"
        if isinstance(value, ast.Compare):
            return "bool"
        if isinstance(value, ast.BoolOp):
            return _joined({self.type(each) for each in value.values})
        if isinstance(value, ast.IfExp):
            return _joined({self.type(value.body), self.type(value.orelse)})
        if isinstance(value, ast.UnaryOp):
            return "bool" if isinstance(value.op, ast.Not) else self.type(value.operand)
        if isinstance(value, ast.BinOp):
            return self._result(value)
        if isinstance(value, ast.Call):
            return self._returned(value)
        if isinstance(value, ast.Subscript):  # x.shape[0]
            return "int" if last_name(value.value) == "shape" else None
        name = attribute_of_self(value)
        known = self.layer.annotations.get(name)
        return known or (
            _joined(self.of_attribute(name)) if name in self.layer.attributes else None
        )

    def _result(self, value: ast.BinOp) -> str | None:
        sides = {self.type(value.left), self.type(value.right)}
        if not sides <= {"int", "float", "bool"}:
            return None
        if isinstance(value.op, (ast.Div, ast.Pow)):
            return "float" if isinstance(value.op, ast.Div) or "float" in sides else None
        return "float" if "float" in sides else "int"

    def _returned(self, value: ast.Call) -> str | None:
        called = last_name(value.func)
        if called in _TENSOR_MAKERS or is_torch_op(value.func):
            return TENSOR
        if called in ("max", "min", "abs") and isinstance(value.func, ast.Name):
            return _joined({self.type(each) for each in value.args})
        return _RETURNS.get(called)


def _parameter_types(init: Function) -> dict[str, str]:
    """Return the types of parameters by their annotations, else by their defaults."""
    pairs = own_parameters(init)
    pairs += zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
    types: dict[str, str] = {}
    for argument, default in pairs:
        if argument.annotation is not None:
            types[argument.arg] = annotation_text(argument.annotation)
        elif isinstance(default, ast.Constant) and default.value is not None:
            types[argument.arg] = type(default.value).__name__
    return types


def _joined(types: set[str | None]) -> str | None:
    """Return the union of types, or None if it is ambiguous."""
    if len(types) == 1 and types != {"None"}:
        return next(iter(types))
    parts = {part for each in types if each is not None for part in each.split(" | ")}
    if None in types or len(parts - {"None"}) != 1:
        return None
    (kind,) = parts - {"None"}
    return f"{kind} | None" if "None" in parts else kind


def _types(name: str, layer: LayerClass) -> set[str | None]:
    return _Values(layer).of_attribute(name)


def _sizes(function: Function) -> set[int]:
    """Return the possible numbers of results of a method; 0 stands for None."""
    returns = [node for node in own_nodes(function) if isinstance(node, ast.Return)]
    return {_size(node.value) for node in returns}


def _size(value: ast.expr | None) -> int:
    if value is None or (isinstance(value, ast.Constant) and value.value is None):
        return 0
    return len(value.elts) if isinstance(value, ast.Tuple) else 1

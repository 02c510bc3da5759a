"""Types of an op's arguments and outputs, inferred from the source."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass

from opweave.cli.migration.source import LayerClass
from opweave.cli.migration.syntax import Function, is_torch_op, last_name, own_nodes

TENSOR = "torch.Tensor"
_TENSOR_MAKERS = frozenset({"Parameter", "empty", "ones", "zeros", "tensor", "arange", "full"})


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
        return _text(argument.annotation)
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
    """Return the type that ``__init__`` assigns to ``self.name``, or None if it is ambiguous."""
    return _joined(_types(name, layer))


def guessed_type(name: str, layer: LayerClass) -> str:
    """Return a guess for an attribute with an ambiguous type."""
    types = _types(name, layer)
    kind = TENSOR if types == {"None"} else "float"
    return f"{kind} | None" if "None" in types else kind


def returned(function: Function) -> str:
    """Return the return annotation of a method, or a guess from its return statements."""
    if function.returns is not None:
        return _text(function.returns)
    (size,) = _sizes(function)
    return TENSOR if size == 1 else f"tuple[{', '.join([TENSOR] * size)}]"


def output_problem(function: Function) -> str:
    """Return why the results of a method cannot be outputs of an op, or ""."""
    sizes = _sizes(function)
    given = _text(function.returns) if function.returns else ""
    if sizes <= {0} or given == "None":
        return "it returns nothing"
    if 0 in sizes or re.search(r"\b(None|Optional)\b", given):
        return "one of its outputs may be None"
    if len(sizes) > 1 or "|" in given or "Union" in given:
        return "it returns a tensor or a tuple"
    return ""


def _text(annotation: ast.expr) -> str:
    """Return the source of an annotation, without quotes around it."""
    quoted = isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
    return annotation.value if quoted else ast.unparse(annotation)  # type: ignore[attr-defined]


def _type(value: ast.expr, parameters: dict[str, ast.arg]) -> str | None:
    if isinstance(value, ast.Name) and value.id in parameters:
        annotation = parameters[value.id].annotation
        return _text(annotation) if annotation else None
    if isinstance(value, ast.Constant):
        return type(value.value).__name__ if value.value is not None else "None"
    if isinstance(value, ast.Compare):
        return "bool"
    if isinstance(value, ast.BoolOp):
        return _joined({_type(each, parameters) for each in value.values})
    if isinstance(value, ast.Call):
        makes = last_name(value.func) in _TENSOR_MAKERS or is_torch_op(value.func)
        return TENSOR if makes else None
    if isinstance(value, ast.IfExp):
        return _joined({_type(value.body, parameters), _type(value.orelse, parameters)})
    return None


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
    init = layer.methods.get("__init__")
    parameters = init.args.args + init.args.kwonlyargs if init else []
    by_name = {arg.arg: arg for arg in parameters}
    return {_type(value, by_name) for value in layer.attributes[name]}


def _sizes(function: Function) -> set[int]:
    """Return the possible numbers of results of a method; 0 stands for None."""
    returns = [node for node in own_nodes(function) if isinstance(node, ast.Return)]
    return {_size(node.value) for node in returns}


def _size(value: ast.expr | None) -> int:
    if value is None or (isinstance(value, ast.Constant) and value.value is None):
        return 0
    return len(value.elts) if isinstance(value, ast.Tuple) else 1

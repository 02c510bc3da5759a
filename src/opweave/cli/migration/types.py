"""Types of an op's arguments and outputs, as far as the source tells them."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass

from opweave.cli.migration.source import Function, LayerClass, last_name

TENSOR = "torch.Tensor"
_TENSOR_MAKERS = frozenset({"Parameter", "empty", "ones", "zeros", "tensor", "arange", "full"})


@dataclass(frozen=True)
class Argument:
    """An argument of an op.

    Attributes:
        default: as source text, or None.
        attribute: the attribute of the layer that it is.
    """

    name: str
    annotation: str
    default: str | None
    attribute: str | None = None


def annotation_of(argument: ast.arg, default: ast.expr | None) -> str:
    """Return the annotation of a parameter; without one, what its default or its use suggests."""
    if argument.annotation is not None:
        return ast.unparse(argument.annotation)
    if default is None:
        return TENSOR
    if isinstance(default, ast.Constant) and default.value is None:
        return f"{TENSOR} | None"
    return type(default.value).__name__ if isinstance(default, ast.Constant) else TENSOR


def source_text(annotation: object) -> str:
    """Return the annotation of an op, postponed or not, with ``torch.Tensor`` for ``Tensor``."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"(?<![.\w])Tensor\b", TENSOR, text)


def attribute_type(name: str, layer: LayerClass) -> str | None:
    """Return the type of what ``__init__`` assigns to ``self.name``, or None if it is not clear."""
    init = layer.methods.get("__init__")
    parameters = init.args.args + init.args.kwonlyargs if init else []
    return _type(layer.attributes[name], {arg.arg: arg for arg in parameters})


def returned(function: Function) -> str:
    """Return the annotation of what a method returns, or nothing if it is not always the same."""
    values = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]
    sizes = {len(v.elts) if isinstance(v, ast.Tuple) else 1 for v in values}
    given = ast.unparse(function.returns) if function.returns else ""
    if len(sizes) != 1 or "|" in given or "Union" in given or "Optional" in given:
        return ""
    (size,) = sizes
    return given or (TENSOR if size == 1 else f"tuple[{', '.join([TENSOR] * size)}]")


def _type(value: ast.expr, parameters: dict[str, ast.arg]) -> str | None:
    if isinstance(value, ast.Name) and value.id in parameters:
        annotation = parameters[value.id].annotation
        return ast.unparse(annotation) if annotation else None
    if isinstance(value, ast.Constant):
        return type(value.value).__name__ if value.value is not None else "None"
    if isinstance(value, (ast.Compare, ast.BoolOp)):
        return "bool"
    if isinstance(value, ast.Call) and last_name(value.func) in _TENSOR_MAKERS:
        return TENSOR
    if isinstance(value, ast.IfExp):
        kinds = {_type(value.body, parameters), _type(value.orelse, parameters)}
        if None not in kinds and len(kinds - {"None"}) == 1:
            (kind,) = kinds - {"None"}
            return f"{kind} | None" if "None" in kinds else kind
    return None

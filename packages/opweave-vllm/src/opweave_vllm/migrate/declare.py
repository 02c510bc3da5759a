"""The op that is declared from a layer's ``forward_native``."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opweave.ir import current_registry
from opweave_vllm.migrate.names import op_name, snake
from opweave_vllm.migrate.reuse import changed_or_returned
from opweave_vllm.migrate.rewrite import Rewritten, rewrite, used_names
from opweave_vllm.migrate.source import NATIVE, LayerClass
from opweave_vllm.migrate.syntax import (
    Function,
    attribute_of_self,
    dotted,
    is_docstring,
    is_static,
    own_parameters,
)
from opweave_vllm.migrate.types import (
    Argument,
    annotation_of,
    attribute_type,
    guessed_type,
    output_problem,
    returned,
    source_text,
)

PLATFORM_METHODS = {
    "forward_cuda": "cuda",
    "forward_hip": "cuda",  # torch's name for ROCm devices
    "forward_cpu": "cpu",
    "forward_xpu": "xpu",
    "forward_tpu": "xla",
    "forward_oot": "",
}

# The words of the annotations that torch.library.infer_schema supports.
_TYPES = frozenset(
    {
        *("torch", "Tensor", "dtype", "device", "int", "float", "bool", "str", "None"),
        *("Optional", "Union", "list", "List", "Sequence", "typing", "collections", "abc"),
    }
)


@dataclass
class OpPlan:
    """A new op with its native implementation, or an existing op of opweave."""

    name: str
    arguments: list[Argument]
    returns: str
    native: Rewritten | None


def declare(layer: LayerClass, path: Path, notes: list[str]) -> OpPlan | None:
    """Return the op for ``forward_native``, or None with the reason in *notes*."""
    native = layer.methods.get(NATIVE)
    if native is None:
        notes.append("It does not define forward_native, so there is no op to declare.")
        return None
    if done := _op_called(native):
        notes.append(f"Its op is ir.ops.{done} already.")
        return None
    if problem := _no_function(native):
        notes.append(
            f"forward_native is not an op: {problem}. Write one function per form, with "
            "positional parameters and fixed outputs, and call them from it."
        )
        return None
    guesses: list[str] = []
    arguments = _arguments(native, layer, guesses)
    body = rewrite(native, layer, {a.attribute: a.name for a in arguments if a.attribute})
    problems = [*_unsupported(arguments), *body.problems]
    if (given := changed_or_returned(native)) is not None:
        problems.append(f"it writes to its argument {given}, or returns it")
    if problems:
        notes.append(f"forward_native is not an op: {'; '.join(problems)}.")
        return None
    notes += guesses
    if native.returns is None:
        notes.append(f"The return type is a guess: {returned(native)}.")
    wanted = layer.registered or snake(layer.name)
    name = op_name(wanted)
    if name != wanted:
        notes.append(f"Its op is called {name}: {wanted!r} is not a valid op name.")
    known = declared(name)
    if known is not None:
        if {a.name for a in known.arguments if not a.default} <= {a.name for a in arguments}:
            notes.append(f"opweave has this op: ir.ops.{name}.")
            return known
        notes.append(
            f"opweave has another op of this name, ir.ops.{name}"
            f"({', '.join(a.name for a in known.arguments)}). Use it if it is the same function."
        )
        name = op_name(f"{snake(path.stem)}_{name}")
    return OpPlan(name, arguments, returned(native), body)


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


def _op_called(native: Function) -> str:
    """Return the name of the op that a method only calls, because it was migrated before, or ""."""
    statements = [each for each in native.body if not is_docstring(each)]
    calls = [s.value for s in statements if isinstance(s, ast.Return) and len(statements) == 1]
    called = dotted(calls[0].func) if calls and isinstance(calls[0], ast.Call) else ""
    found = re.search(r"\bops\.(\w+)\.native$", called)
    return found[1] if found else ""


def _no_function(native: Function) -> str:
    if native.args.vararg or native.args.kwarg:
        return "it takes *args or **kwargs"
    if native.args.kwonlyargs or native.args.posonlyargs:
        return "it has keyword-only or positional-only parameters"
    if native.decorator_list and not is_static(native):
        return "it is decorated"
    return output_problem(native)


def _arguments(native: Function, layer: LayerClass, notes: list[str]) -> list[Argument]:
    """Return the op's arguments: the method's, with the attributes after the required ones."""
    own = [
        Argument(arg.arg, annotation_of(arg, default), ast.unparse(default) if default else None)
        for arg, default in own_parameters(native)
    ]
    methods = [layer.methods[name] for name in PLATFORM_METHODS if name in layer.methods]
    names = set().union(*map(used_names, [native, *methods]))
    used = []
    for name in _used_attributes(native, layer):
        kind = attribute_type(name, layer)
        if kind is None:
            kind = guessed_type(name, layer)
            notes.append(f"The type of {name} is a guess: {kind}.")
        argument = name
        while argument in names:
            argument += "_"
        used.append(Argument(argument, kind, None, name))
    required = [argument for argument in own if argument.default is None]
    return [*required, *used, *(argument for argument in own if argument.default is not None)]


def _unsupported(arguments: Sequence[Argument]) -> Iterator[str]:
    """Yield why arguments have types that torch ops do not have."""
    for each in arguments:
        if not set(re.findall(r"\w+", each.annotation)) <= _TYPES:
            yield f"the type of {each.name} is {each.annotation}"


def _used_attributes(native: Function, layer: LayerClass) -> list[str]:
    """Return the attributes of ``self`` that a method uses as values.

    Attributes that it calls are not values, nor are objects of which it reads a part, except for
    tensors.
    """
    opened = {
        attribute_of_self(node.func if isinstance(node, ast.Call) else node.value)
        for node in ast.walk(native)
        if isinstance(node, (ast.Call, ast.Attribute, ast.Subscript))
    }
    read = dict.fromkeys(map(attribute_of_self, ast.walk(native)))
    return [
        name
        for name in read
        if name in layer.attributes
        and layer.kernel(name) is None
        and (name not in opened or attribute_type(name, layer) is not None)
    ]

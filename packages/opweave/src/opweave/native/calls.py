"""The Python functions of native ops: call paths, autograd and checks of schemas."""

from __future__ import annotations

import hashlib
import importlib
import keyword
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from opweave import torch_compat
from opweave.ir.errors import did_you_mean
from opweave.native.toolchain import NativeImportError
from opweave.plain_call import differentiates, is_watched

# The name and the arguments of an op, from its schema.


def name_of(op: torch_compat.OpOverload) -> str:
    """Return the op's name without its namespace."""
    return op._schema.name.partition("::")[2]


def arguments_of(op: torch_compat.OpOverload) -> tuple[tuple[str, bool], ...]:
    """Return the name of each argument, and whether the op mutates it."""
    return tuple((argument.name, argument.is_write) for argument in op._schema.arguments)


# Makes Dynamo call the functions instead of tracing them, since it cannot trace schema objects.
# torch.compiler.assume_constant_result sets the same, but importing it imports all of Dynamo.
name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
arguments_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Lazily negated and conjugated views, whose memory does not hold their values.


def check_none_written(op: torch_compat.OpOverload, *arguments: object) -> None:
    """Raise RuntimeError if *op* mutates such a view, which torch would replace by a copy."""
    for (name, is_written), value in zip(arguments_of(op), arguments, strict=False):
        if is_written and isinstance(value, Tensor) and (value.is_neg() or value.is_conj()):
            kind = "negated" if value.is_neg() else "conjugated"
            raise RuntimeError(
                f"{name_of(op)}: {name} is mutated, but is a lazily {kind} view; write to another "
                "tensor, and copy_() it into the view"
            )


# Calls of native ops with autograd: they have no derivatives, so a lost gradient is an error.


def call_watched(op: torch_compat.OpOverload, *arguments: Any) -> Any:
    """Call *op* through the dispatcher, and increment the version of each tensor that it mutates.

    A backward pass that needs the old values then raises, as for torch's own ops.

    Raises:
        RuntimeError: the op mutates a negated view, or mutates floating-point tensors in grad mode
            while a tensor requires grad; or a tensor has a tangent.
    """
    tensors = {
        argument: (value, is_written)
        for (argument, is_written), value in zip(arguments_of(op), arguments, strict=False)
        if isinstance(value, Tensor)
    }
    with torch_compat.no_torch_function():  # internal calls must not reach the user's modes
        check_none_written(op, *arguments)
        _check_derivatives(name_of(op), tensors)
        written = [t for t, is_written in tensors.values() if is_written and not t.is_inference()]
    result = op(*arguments)
    for tensor in written:
        torch.autograd.graph.increment_version(tensor)
    return result


def _check_derivatives(op: str, tensors: Mapping[str, tuple[Tensor, bool]]) -> None:
    writes_numbers = any(written and t.is_floating_point() for t, written in tensors.values())
    for argument, (tensor, _) in tensors.items():
        if tensor.requires_grad and writes_numbers and torch.is_grad_enabled():
            raise RuntimeError(_refusal(op, argument))
        if torch_compat.has_tangent(tensor):
            raise RuntimeError(
                f"{op}: {argument} has a tangent, but the op does not support forward-mode AD; "
                "call it on tensors without tangents"
            )


def call_unwatched(op: torch_compat.OpOverload, *arguments: Any) -> Any:
    """Call *op* through the dispatcher without autograd.

    Raises:
        RuntimeError: the op mutates a negated view.
    """
    with torch_compat.no_torch_function():
        check_none_written(op, *arguments)
    return op(*arguments)


def call_traced(op: torch_compat.OpOverload, *arguments: Any) -> Any:
    """Like `call_watched`, as far as Dynamo can trace it.

    Raises:
        RuntimeError: the op mutates floating-point tensors in grad mode while a tensor requires
            grad.
    """
    if not torch.is_grad_enabled():
        return op(*arguments)
    arguments_by_name = list(zip(arguments_of(op), arguments, strict=False))
    written = [value for (_, is_written), value in arguments_by_name if is_written]
    if any(t is not None and t.is_floating_point() for t in written):
        for (argument, _), value in arguments_by_name:
            if isinstance(value, Tensor) and value.requires_grad:
                raise RuntimeError(_refusal(name_of(op), argument))
    result = op(*arguments)
    for tensor in written:
        if tensor is not None:
            torch.autograd.graph.increment_version(tensor)
    return result


def _refusal(op: str, argument: str) -> str:
    return (
        f"{op}: {argument} requires grad, but the op is not differentiable; call it under "
        "torch.no_grad(), or with detached tensors (Tensor.detach)"
    )


# Checks of op schemas before torch registers them, because registration is permanent.


def schemas(raw: ModuleType) -> dict[str, str]:
    """Return the schemas of the ops of *raw* by name."""
    names = (name for name in dir(raw) if not name.startswith("_"))
    return {name: getattr(raw, name).__doc__ for name in names}


def refusal(schemas_by_op: Mapping[str, str], namespace: str) -> str | None:
    """Return why a module with these schemas is unusable, or None if it is usable."""
    if not schemas_by_op:
        return "its sources register no op with OPWEAVE_EXTENSION_MODULE(m) { m.def(...); }"
    attributes = torch_compat.namespace_attributes(namespace)  # such as 'name'
    for op, schema in schemas_by_op.items():
        if op in attributes:
            return (
                f"torch reserves {op!r} in every namespace of torch.ops, so '{schema}' needs "
                "another name"
            )
        try:
            parsed = torch_compat.parse_schema(f"{namespace}::{schema}")
        except RuntimeError as error:
            why = str(error).partition("\n")[0].removesuffix(" here:")
            return f"torch rejects the schema of op {op!r}, '{schema}': {why}"
        for name in (op, *(argument.name for argument in parsed.arguments)):
            if keyword.iskeyword(name) or name.startswith("_"):
                return (
                    f"'{schema}' cannot be compiled: {name!r} is a Python keyword or starts with "
                    "an underscore; choose another name"
                )
    return None


# How a problem begins that a module's ``_open`` reports and its ops are to blame for. A torch that
# lacks a needed symbol is not an error of the module: it works without torch ops.
_FAULT_OF_OPS = "torch could not "


# The factory of the Python functions of native ops.


Function = Callable[..., Any]

_SOURCE = """
def {op}({parameters}):{checks}
    try:
        return direct({parameters})
    except TypeError:  # tensors that need the dispatcher
        return fall_back({parameters})

def traced({parameters}):
    return {traced}
"""
_CHECKS = """
    if differentiates():
        return watched(*arguments)
    if is_watched():
        return unwatched(*arguments)"""


def callable_of(
    op: str,
    raw: ModuleType,
    namespace: str,
    *,
    direct: bool,
    problem: str | None = None,
    in_kernel: bool = False,
) -> Function:
    """Return *op* of the module *raw* as a function that takes the cheapest path for each call.

    It first tries the C++ function, which is cheap but only accepts plain CPU tensors. Dynamo
    traces the torch op instead. Arguments are positional. Its attribute ``direct`` is the bare C++
    function, for callers who know that a direct call is possible.

    Args:
        direct: whether the C++ function may be called.
        problem: why torch.ops lacks the op, if so.
        in_kernel: for calls by the kernel of an IR op, which has handled gradients, modes and
            transforms. The parameters are then explicit, because passing ``*arguments`` would cost
            more than the call itself.
    """
    torch_op: Any = _torch_op(op, namespace, problem)
    path = f"torch.ops.{namespace}.{op}.default"
    scope = {
        "__name__": __name__,  # where Dynamo looks for the next two
        "torch": torch,
        "call_traced": call_traced,
        "differentiates": differentiates,
        "is_watched": is_watched,
        "direct": getattr(raw, op) if direct else torch_op,
    }
    if in_kernel:
        checks, parameters = "", ", ".join(a.name for a in torch_op._schema.arguments)
        traced, scope["fall_back"] = f"{path}({parameters})", torch_op
    else:
        checks, parameters = _CHECKS, "*arguments"
        traced, watched, unwatched = f"call_traced({path}, *arguments)", torch_op, torch_op
        if problem is None:
            watched, unwatched = partial(call_watched, torch_op), partial(call_unwatched, torch_op)
        fall_back = partial(_fall_back, unwatched)
        scope.update(watched=watched, unwatched=unwatched, fall_back=fall_back)
    exec(_SOURCE.format(op=op, parameters=parameters, checks=checks, traced=traced), scope)
    function: Any = scope[op]
    torch_compat.trace_instead(function, scope["traced"] if problem is None else torch_op)
    torch_compat.run_untraced(function)  # after a graph break
    function.__doc__, function.direct = getattr(raw, op).__doc__, scope["direct"]
    return cast(Function, function)


def _torch_op(op: str, namespace: str, problem: str | None) -> Function:
    """Return the torch op, or a function that raises if it is unavailable."""
    if problem is None:
        torch_op: Function = getattr(getattr(torch.ops, namespace), op).default
        return torch_op

    def unavailable(*arguments: object) -> None:
        raise RuntimeError(f"torch.ops.{namespace}.{op} is not available: {problem}.")

    return unavailable


def _fall_back(unwatched: Function, *arguments: Any) -> Any:
    """Call the dispatcher after a TypeError of the C++ function, if it may be of use."""
    if any(isinstance(a, Tensor) for a in arguments) or has_torch_function(arguments):
        return unwatched(*arguments)
    raise  # noqa: PLE0704 (the error of the C++ function is clearer than the dispatcher's)


# The two call paths of a native module, combined into one function per op.


class NativeModule(ModuleType):
    """The ops of a native module: one function each.

    A function calls C++ directly if possible. Under ``torch.compile``, in grad mode, under a
    dispatch mode, or for tensor subclasses, it calls ``torch.ops.<namespace>.<op>``. Arguments are
    positional. Its attribute ``direct`` is the bare C++ function, for callers who know that a
    direct call is possible.
    """

    def __init__(self, name: str, namespace: str, raw: ModuleType) -> None:
        super().__init__(name, f"Native ops, also torch.ops.{namespace}.")
        self.__file__ = raw.__file__
        _check_registration(raw, namespace)
        direct, problem = open_call_paths(raw, namespace)
        if problem is not None and problem.startswith(_FAULT_OF_OPS):
            raise NativeImportError(problem)
        _mark_caches(raw, namespace)
        for op in schemas(raw):
            function = callable_of(op, raw, namespace, direct=direct, problem=problem)
            setattr(self, op, function)

    def __getattr__(self, name: str) -> Any:
        ops = [op for op in self.__dict__ if not op.startswith("_")]
        raise AttributeError(
            f"The native module {self.__name__!r} has no op {name!r}. {did_you_mean(name, ops)}"
        )


def import_module(name: str) -> NativeModule:
    """Import the native module *name*, such as ``demo._C_ops``, that was built ahead of time.

    Its torch ops are in the namespace of the package: ``torch.ops.demo``.

    Raises:
        NativeImportError: it is not built, does not load, is not a native module, or torch rejects
            its ops.
        ModuleNotFoundError: the package, or a module that it imports, does not exist.
    """
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise NativeImportError(f"{name!r} is not the name of a module, such as demo._C_ops.")
    namespace, _, last = name.rpartition(".")
    namespace = namespace.replace(".", "_") or last
    try:
        raw = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise NativeImportError(
            f"{name} is not built; build it with: opweave native build FOLDER"
        ) from error
    except ImportError as error:
        raise NativeImportError(f"{name} does not load: {error}") from error
    if not hasattr(raw, "_namespace"):
        raise NativeImportError(f"{name} is not a native module built by this version of opweave.")
    try:
        return NativeModule(name, namespace, raw)
    except NativeImportError as error:
        raise NativeImportError(f"{name} does not load: {error}.") from error


_opened: dict[str, str] = {}  # file -> namespace


def opened_modules() -> dict[str, str]:
    """Return the files of the native modules in this process by namespace."""
    return {namespace: file for file, namespace in _opened.items()}


def open_call_paths(raw: Any, namespace: str) -> tuple[bool, str | None]:
    """Open both call paths of the module *raw*, and register fake implementations of its ops.

    Return whether direct calls work, and why torch.ops lacks the ops, if so.
    """
    _opened[raw.__file__ or ""] = namespace
    direct, problem = raw._open(torch.Tensor, torch.nn.Parameter)
    if problem is None:
        for op in schemas(raw):
            torch.library.register_fake(f"{namespace}::{op}", _fake(raw, op, namespace))
    return direct, problem


def _mark_caches(raw: ModuleType, namespace: str) -> None:
    """Add the schemas of the ops to torch's cache keys, which contain only their names.

    Otherwise a graph that was compiled for an old schema, such as one that does not declare a
    mutation, would be reused.
    """
    digest = hashlib.sha256(repr(sorted(schemas(raw).values())).encode()).hexdigest()
    mark = f" {namespace}:{digest[:16]}"
    if mark not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += mark


def _check_registration(raw: Any, namespace: str) -> None:
    """Check that torch accepts all ops of *raw* before any is defined, since that is permanent."""
    problem, built_for = refusal(schemas(raw), namespace), raw._namespace()
    if problem is None and built_for != namespace:
        problem = (
            f"its ops belong to torch.ops.{built_for}, but those of this package must be in "
            f"torch.ops.{namespace}; build it again for this package"
        )
    if problem is not None:
        raise NativeImportError(problem)
    if raw.__file__ in _opened:
        return
    for op, schema in schemas(raw).items():
        if hasattr(getattr(torch.ops, namespace), op):
            raise NativeImportError(
                f"torch.ops.{namespace}.{op} already exists, so torch cannot define '{schema}'; "
                "choose another name"
            )


def _fake(raw: ModuleType, op: str, namespace: str) -> Function:
    schema: str = getattr(raw, op).__doc__
    returns_nothing = schema.rpartition("->")[2].strip() == "()"

    def fake(*arguments: object) -> None:
        _check_devices(op, arguments)
        if not returns_nothing:
            # The result depends on data, which breaks the graph, as Tensor.item() does.
            raise torch_compat.depends_on_values(getattr(getattr(torch.ops, namespace), op).default)

    return fake


def _check_devices(op: str, arguments: tuple[object, ...]) -> None:
    """Check that all tensors are on one device; with meta tensors, torch calls only the fake."""
    devices = {str(a.device): None for a in arguments if isinstance(a, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(
            f"{op}: the tensors must be on one device, found {' and '.join(devices)}; move them to "
            "one of these"
        )

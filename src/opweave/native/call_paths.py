"""The two call paths of a native module, combined into one function per op."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function

from opweave.base import compat
from opweave.base.plain_call import differentiates, is_watched
from opweave.ir.errors import did_you_mean
from opweave.native import registration
from opweave.native.autograd import (
    call_traced,
    call_unwatched,
    call_watched,
)
from opweave.native.errors import NativeImportError

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class CallPaths:
    """Which call paths of a module are open; *problem* says why torch.ops has none of its ops."""

    direct: bool
    problem: str | None


class _Interface(Protocol):
    def _open(self, tensor: type, parameter: type) -> tuple[bool, str | None]: ...
    def _namespace(self) -> str: ...


class NativeModule(ModuleType):
    """The ops of a native module: one function each.

    A function goes straight to C++ where it may, and through ``torch.ops.<namespace>.<op>`` under
    ``torch.compile``, in grad mode, under a dispatch mode, or for tensors that only torch
    understands. Arguments are positional. Its attribute ``direct`` is the C++ function alone, for
    callers who know which of these they are in.
    """

    def __init__(self, name: str, namespace: str, raw: ModuleType) -> None:
        super().__init__(name, f"Native ops, also torch.ops.{namespace}.")
        self.__file__ = raw.__file__
        _check_registration(raw, namespace)
        paths = open_call_paths(raw, namespace)
        problem = registration.failure(paths.problem)
        if problem is not None:
            raise NativeImportError(problem)
        _mark_caches(raw, namespace)
        for op in registration.schemas(raw):
            setattr(self, op, function_of(op, raw, namespace, paths))

    def __getattr__(self, name: str) -> Any:
        ops = [op for op in self.__dict__ if not op.startswith("_")]
        raise AttributeError(
            f"The native module {self.__name__!r} has no op {name!r}. {did_you_mean(name, ops)}"
        )


def import_module(name: str) -> NativeModule:
    """Import the native module *name*, such as ``demo._C_ops``, that was built ahead of time.

    Its torch ops are ``torch.ops.<namespace>``, the namespace being the package's name.

    Raises:
        NativeImportError: it is not built, does not load, is no native module, or torch does not
            take its ops.
        ModuleNotFoundError: there is no such package, or a module that it imports is missing.
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
        raise NativeImportError(f"{name} is a Python module, but none that this opweave has built.")
    try:
        return NativeModule(name, namespace, raw)
    except NativeImportError as error:
        raise NativeImportError(f"{name} does not load: {error}.") from error


_opened: dict[str, str] = {}  # namespaces by file


def opened_modules() -> dict[str, str]:
    """Return the files of the native modules in this process, by the namespace of their ops."""
    return {namespace: file for file, namespace in _opened.items()}


def open_call_paths(raw: ModuleType, namespace: str) -> CallPaths:
    """Open both call paths of *raw*, and teach torch what its ops return for fake tensors."""
    _opened[raw.__file__ or ""] = namespace
    direct, problem = cast(_Interface, raw)._open(torch.Tensor, torch.nn.Parameter)
    if problem is None:
        for op in registration.schemas(raw):
            torch.library.register_fake(f"{namespace}::{op}", _fake(raw, op, namespace))
    return CallPaths(direct, problem)


def _mark_caches(raw: ModuleType, namespace: str) -> None:
    """Keep torch from taking graphs from its caches that were made for other schemas.

    An op that did not say that it writes is left out of a graph; torch's key of it has names only.
    """
    found = sorted(registration.schemas(raw).values())
    mark = f" {namespace}:{hashlib.sha256(repr(found).encode()).hexdigest()[:16]}"
    if mark not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += mark


def _check_registration(raw: ModuleType, namespace: str) -> None:
    """Check that torch takes the ops of *raw*, before it gets any: torch forgets none."""
    found = registration.schemas(raw)
    problem = registration.refusal(found, namespace) or _misplaced(raw, namespace)
    if problem is None and raw.__file__ not in _opened:
        problem = registration.defined_before(found, namespace)
    if problem is not None:
        raise NativeImportError(problem)


def _misplaced(raw: ModuleType, namespace: str) -> str | None:
    """Return that *raw* was built for ops of another namespace, if it was."""
    built_for = cast(_Interface, raw)._namespace()
    if built_for == namespace:
        return None
    return (
        f"its ops are those of torch.ops.{built_for}, and in this package they would be of "
        f"torch.ops.{namespace}; build it again, for the package that it is in"
    )


def _fake(raw: ModuleType, op: str, namespace: str) -> Function:
    schema: str = getattr(raw, op).__doc__
    returns_nothing = schema.rpartition("->")[2].strip() == "()"

    def fake(*arguments: object) -> None:
        _check_devices(op, arguments)
        if not returns_nothing:
            # Known only when the op has run, which breaks the graph, as Tensor.item() does.
            raise compat.depends_on_values(getattr(getattr(torch.ops, namespace), op).default)

    return fake


def _check_devices(op: str, arguments: tuple[object, ...]) -> None:
    """Check what the op itself would: among tensors on ``meta``, torch calls the fake alone."""
    devices = {str(a.device): None for a in arguments if isinstance(a, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(
            f"{op}: the tensors must be on one device, found {' and '.join(devices)}; move one of "
            "them"
        )


def function_of(op: str, raw: ModuleType, namespace: str, paths: CallPaths) -> Function:
    """Return *op* as one function that takes the cheapest path for each call."""
    dispatched = _dispatched(op, namespace, paths)
    watched = unwatched = traced = dispatched
    if isinstance(dispatched, compat.OpOverload):
        watched, traced = partial(call_watched, dispatched), partial(call_traced, dispatched)
        unwatched = partial(call_unwatched, dispatched)
    direct: Function = getattr(raw, op) if paths.direct else dispatched

    def call(*arguments: Any) -> Any:
        if is_dynamo_compiling():
            return traced(*arguments)
        if differentiates():  # through the dispatcher, where modes see it
            return watched(*arguments)
        if is_watched():
            return unwatched(*arguments)
        try:
            return direct(*arguments)
        except TypeError:  # not plain tensors: torch's dispatcher knows what they are
            if not any(isinstance(a, Tensor) for a in arguments) and not has_torch_function(
                arguments
            ):
                raise  # there is none, which the dispatcher says less well
            return unwatched(*arguments)

    call.__name__ = call.__qualname__ = op
    call.__doc__ = getattr(raw, op).__doc__
    call.direct = direct  # type: ignore[attr-defined]
    return call


def _dispatched(op: str, namespace: str, paths: CallPaths) -> Function:
    """Return the op through torch's dispatcher."""
    if paths.problem is None:
        found: Function = getattr(getattr(torch.ops, namespace), op).default
        return found

    def unavailable(*arguments: object) -> None:
        raise RuntimeError(f"torch.ops.{namespace}.{op} is not available: {paths.problem}.")

    return unavailable

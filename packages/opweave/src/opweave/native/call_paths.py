"""The two call paths of a native module, combined into one function per op."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from opweave.base import compat
from opweave.ir.errors import did_you_mean
from opweave.native import registration
from opweave.native.callables import callable_of
from opweave.native.errors import NativeImportError

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class CallPaths:
    """Whether a module's direct calls work; *problem* says why torch.ops lacks its ops, if so."""

    direct: bool
    problem: str | None


class _ModuleInterface(Protocol):
    def _open(self, tensor: type, parameter: type) -> tuple[bool, str | None]: ...
    def _namespace(self) -> str: ...


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
        paths = open_call_paths(raw, namespace)
        problem = registration.failure(paths.problem)
        if problem is not None:
            raise NativeImportError(problem)
        _mark_caches(raw, namespace)
        for op in registration.schemas(raw):
            function = callable_of(op, raw, namespace, direct=paths.direct, problem=paths.problem)
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


def open_call_paths(raw: ModuleType, namespace: str) -> CallPaths:
    """Open both call paths of *raw*, and register fake implementations of its ops."""
    _opened[raw.__file__ or ""] = namespace
    direct, problem = cast(_ModuleInterface, raw)._open(torch.Tensor, torch.nn.Parameter)
    if problem is None:
        for op in registration.schemas(raw):
            torch.library.register_fake(f"{namespace}::{op}", _fake(raw, op, namespace))
    return CallPaths(direct, problem)


def _mark_caches(raw: ModuleType, namespace: str) -> None:
    """Add the schemas of the ops to torch's cache keys, which contain only their names.

    Otherwise a graph that was compiled for an old schema, such as one that does not declare a
    mutation, would be reused.
    """
    found = sorted(registration.schemas(raw).values())
    mark = f" {namespace}:{hashlib.sha256(repr(found).encode()).hexdigest()[:16]}"
    if mark not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += mark


def _check_registration(raw: ModuleType, namespace: str) -> None:
    """Check that torch accepts all ops of *raw* before any is defined, since that is permanent."""
    found = registration.schemas(raw)
    problem = registration.refusal(found, namespace) or _misplaced(raw, namespace)
    if problem is None and raw.__file__ not in _opened:
        problem = registration.defined_before(found, namespace)
    if problem is not None:
        raise NativeImportError(problem)


def _misplaced(raw: ModuleType, namespace: str) -> str | None:
    """Return a message if *raw* was built for another namespace."""
    built_for = cast(_ModuleInterface, raw)._namespace()
    if built_for == namespace:
        return None
    return (
        f"its ops belong to torch.ops.{built_for}, but those of this package must be in "
        f"torch.ops.{namespace}; build it again for this package"
    )


def _fake(raw: ModuleType, op: str, namespace: str) -> Function:
    schema: str = getattr(raw, op).__doc__
    returns_nothing = schema.rpartition("->")[2].strip() == "()"

    def fake(*arguments: object) -> None:
        _check_devices(op, arguments)
        if not returns_nothing:
            # The result depends on data, which breaks the graph, as Tensor.item() does.
            raise compat.depends_on_values(getattr(getattr(torch.ops, namespace), op).default)

    return fake


def _check_devices(op: str, arguments: tuple[object, ...]) -> None:
    """Check that all tensors are on one device; with meta tensors, torch calls only the fake."""
    devices = {str(a.device): None for a in arguments if isinstance(a, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(
            f"{op}: the tensors must be on one device, found {' and '.join(devices)}; move them to "
            "one of these"
        )

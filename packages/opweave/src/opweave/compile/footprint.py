"""Collect what the behavior of a function depends on, besides its arguments."""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from os.path import isfile
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

import torch

from opweave.base.compat import OpOverload, OpOverloadPacket
from opweave.compile import sources
from opweave.ir.dispatch import Callee

_PLAIN = (int, float, complex, str, bytes, range, type(None), type(...))
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONSTANT = (*_PLAIN, *_TORCH, enum.Enum, tuple, frozenset)
_WRAPPED = ("__wrapped__", "fn")  # attributes for the wrapped function: functools, Triton and torch
_BINDING = (functools.partial, MethodType)
_NAMED = (Callee, OpOverload, OpOverloadPacket)


class _Text(NamedTuple):
    """The facts about a code object that do not depend on its globals."""

    code: str
    used: tuple[str, ...]  # names of globals and attributes
    imported: tuple[str, ...]  # names of modules


class Footprint:
    """Facts about functions and the objects that they refer to, in order of discovery.

    The facts about a function are:

    - its bytecode, and its module with the files that it uses (:mod:`opweave.compile.sources`);
    - its closure, defaults, and the arguments of a ``partial``;
    - the globals that it names: the identity of each function, class or module, the value of a
      constant, the facts about an object of the same package, without a source file or bound by a
      ``partial``, and the module of any other object.

    For torch and the standard library, the version is enough.
    """

    def __init__(self) -> None:
        self.facts: list[str] = []
        self.modules: dict[str, ModuleType] = {}
        self.installed: dict[str, ModuleType] = {}
        self.has_source = True  # whether every function has a source file
        self._met: dict[object, object] = {}  # by id; holding the values keeps their ids unique

    def hold(self, value: Any) -> None:
        """Add a value that a function holds, from any package."""
        if isinstance(value, enum.Enum):
            self.facts.append(f"{type(value).__qualname__}.{value.name}")
        elif isinstance(value, (*_PLAIN, *_TORCH)):
            self.facts.append(f"{type(value).__name__} {value!r}")
        elif isinstance(value, (tuple, frozenset)):
            self._all(sorted(value, key=repr) if isinstance(value, frozenset) else value)
        elif id(value) not in self._met:
            self._met[id(value)] = value
            self._object(value)

    def _all(self, values: Iterable[Any]) -> None:
        self.facts.append("(")
        for value in values:
            self.hold(value)
        self.facts.append(")")

    def _object(self, value: Any) -> None:
        self.facts.append(_identity(value))
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, functools.partial):
            self._all((value.func, value.args, *sorted(value.keywords.items())))
        elif isinstance(value, MethodType):
            self._all((value.__func__, value.__self__))
        elif isinstance(value, (staticmethod, classmethod)):
            self.hold(value.__func__)
        elif isinstance(value, property):
            self._all((value.fget,))
        elif isinstance(value, ModuleType):
            self._module(value)
        elif isinstance(value, type):
            self._class(value)
        elif not isinstance(value, Callee):  # the key contains every op and its policy
            self._instance(value)

    def _function(self, function: FunctionType) -> None:
        module = _module_of(function)
        self._all(_contents(function))
        if _is_versioned(module):
            return
        if _has_source(function):
            self._module(module)
            self._module(sys.modules.get(function.__module__ or ""))  # set by functools.wraps
        else:
            self.has_source = False
        self._all((function.__defaults__, *sorted((function.__kwdefaults__ or {}).items())))
        self._code(function.__code__, function.__globals__, module)

    def _class(self, kind: type) -> None:
        if _is_versioned(module := _module_of(kind)):
            return
        self._module(module)
        for name, value in vars(kind).items():
            if isinstance(value, (FunctionType, staticmethod, classmethod, property)):
                self._all((name, value))

    def _instance(self, value: Any) -> None:
        """Add an object: its class, constants, callables and wrapped function."""
        kind = type(value)
        self.hold(kind)
        if not _is_versioned(_module_of(kind)):
            held = getattr(value, "__dict__", {}).items()
            self._all(item for item in held if _is_constant(item[1]) or callable(item[1]))
        if callable(value):
            inner = [getattr(value, name, None) for name in _WRAPPED]
            self._all(each for each in inner if callable(each))

    def _code(self, code: CodeType, names: Mapping[str, Any], home: ModuleType | None) -> None:
        text = _text_of(code, str(names.get("__package__") or ""))
        self.facts.append(text.code)
        for name in text.imported:
            self._named(name, sys.modules.get(name), home, text.used)
        for name in text.used:
            if name in names:
                self._named(name, names[name], home, text.used)

    def _named(self, name: str, value: Any, home: ModuleType | None, used: tuple[str, ...]) -> None:
        """Add the value of the global *name*, and the attributes that code may read from it."""
        if _is_constant(value):
            self._all((name, value))
            return
        self.facts.append(f"{name} is {_identity(value)}")
        if isinstance(value, _BINDING):
            self.hold(value)
            return
        if not _is_at_home(value, home):
            self._elsewhere(_module_of(value))
            return
        if not isinstance(value, ModuleType) and callable(value):
            self.hold(value)
        if isinstance(value, (ModuleType, type)) and (id(value), id(used)) not in self._met:
            self._met[id(value), id(used)] = used
            for attribute in used:
                self._named(attribute, vars(value).get(attribute), home, used)

    def _elsewhere(self, module: ModuleType | None) -> None:
        """Add a module of another package; if installed, its version and file are enough."""
        if module is not None and sources.is_installed(module):
            if not _is_versioned(module):
                self.installed[module.__name__] = module
        else:
            self._module(module)

    def _module(self, module: ModuleType | None) -> None:
        if module is not None and not _is_versioned(module):
            self.modules[module.__name__] = module


@lru_cache(maxsize=4096)
def _text_of(code: CodeType, package: str) -> _Text:
    codes = list(sources.codes_in(code))
    facts = [(each.co_name, each.co_code, each.co_names, *_constants_of(each)) for each in codes]
    used = dict.fromkeys(name for each in codes for name in each.co_names)
    imported = [name for each in codes for name in sources.imported_by(each, package)]
    return _Text(repr(facts), tuple(used), tuple(imported))


def _constants_of(code: CodeType) -> list[str]:
    # The iteration order of a set differs between processes.
    constants = [c for c in code.co_consts if not isinstance(c, CodeType)]
    return [repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c) for c in constants]


def _is_constant(value: object) -> bool:
    return isinstance(value, _CONSTANT) or (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and bool(cast("Any", value).__dataclass_params__.frozen)
    )


def _identity(value: object) -> str:
    """Return the qualified name of a function, class or module, or the class of another object."""
    if isinstance(value, _NAMED):
        return repr(value)
    if isinstance(value, ModuleType):  # torch.classes creates a class for any other attribute
        return f"module {value.__name__}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    return f"{type(value).__qualname__} {getattr(value, '__module__', '')}.{name}"


def _contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is still empty
            yield None


def _has_source(function: FunctionType) -> bool:
    return isfile(function.__code__.co_filename)


def _module_of(value: Any) -> ModuleType | None:
    if isinstance(value, ModuleType):
        return value
    names = getattr(value, "__globals__", None)  # unlike __module__, not changed by decorators
    name = names.get("__name__") if isinstance(names, dict) else getattr(value, "__module__", None)
    return sys.modules.get(str(name))


def _is_versioned(module: ModuleType | None) -> bool:
    return module is not None and sources.is_versioned(module.__name__)


def _is_at_home(value: Any, home: ModuleType | None) -> bool:
    """Return whether *value*, a module, function or class, is in *home*'s package or has no file.

    A function wrapped by a decorator from another package belongs to its own package.
    """
    if isinstance(value, FunctionType):
        if hasattr(value, "__wrapped__") and _is_at_home(value.__wrapped__, home):
            return True
        if not _has_source(value):
            return not _is_versioned(_module_of(value))
    module = _module_of(value)
    return home is not None and module is not None and sources.together(home, module)

"""What a function's behaviour depends on besides its arguments, as far as Python shows it."""

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
_WRAPPED = ("__wrapped__", "fn")  # where functools, and Triton and torch, keep a function
_BINDING = (functools.partial, MethodType)
_NAMED = (Callee, OpOverload, OpOverloadPacket)


class _Text(NamedTuple):
    """What can be said of code alone."""

    code: str
    used: tuple[str, ...]  # globals and attributes
    imported: tuple[str, ...]  # modules


class Footprint:
    """Facts about functions and what they refer to, in the order in which they are met.

    A function counts by its bytecode, by the module it is from (see
    :mod:`opweave.compile.sources`), by what it holds (closure, defaults, arguments of a
    ``partial``), and by the globals that it names: which function, class or module each is, its
    value if it is a constant, what it depends on if it is of the same package, has no source file
    or is a ``partial``, and the module that it is from otherwise. Torch and Python's own library
    count by their versions.
    """

    def __init__(self) -> None:
        self.facts: list[str] = []
        self.modules: dict[str, ModuleType] = {}
        self.installed: dict[str, ModuleType] = {}
        self.has_source = True  # whether every function met has a file
        self._met: dict[object, object] = {}  # with the values, so that their ids stay theirs

    def hold(self, value: Any) -> None:
        """Add a value that a function holds, of whatever package."""
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
        elif not isinstance(value, Callee):  # every op is in the key; what runs is its policy's
            self._instance(value)

    def _function(self, function: FunctionType) -> None:
        module = _module_of(function)
        self._all(_contents(function))
        if _is_versioned(module):
            return
        if _has_source(function):
            self._module(module)
            self._module(sys.modules.get(function.__module__ or ""))  # what functools.wraps says
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
        """Add an object: its class, its constants and functions, and the function it wraps."""
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
        """Add what code calls *name*; of a module or a class, what it may read there."""
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
        """Add a module of another package: installed, it counts by its version and its file."""
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
    # The order of a set is another one in each process.
    constants = [c for c in code.co_consts if not isinstance(c, CodeType)]
    return [repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c) for c in constants]


def _is_constant(value: object) -> bool:
    return isinstance(value, _CONSTANT) or (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and bool(cast("Any", value).__dataclass_params__.frozen)
    )


def _identity(value: object) -> str:
    """Return which function, class or module *value* is; of another object, of which class."""
    if isinstance(value, _NAMED):
        return repr(value)
    if isinstance(value, ModuleType):  # torch.classes makes a class of any other attribute
        return f"module {value.__name__}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    return f"{type(value).__qualname__} {getattr(value, '__module__', '')}.{name}"


def _contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it yet
            yield None


def _has_source(function: FunctionType) -> bool:
    return isfile(function.__code__.co_filename)


def _module_of(value: Any) -> ModuleType | None:
    if isinstance(value, ModuleType):
        return value
    names = getattr(value, "__globals__", None)  # which no decorator changes
    name = names.get("__name__") if isinstance(names, dict) else getattr(value, "__module__", None)
    return sys.modules.get(str(name))


def _is_versioned(module: ModuleType | None) -> bool:
    return module is not None and sources.is_versioned(module.__name__)


def _is_at_home(value: Any, home: ModuleType | None) -> bool:
    """Whether *value*, a module, function or class, is of the package *home* or has no file.

    A wrapper that a decorator of another package made is where the function that it wraps is.
    """
    if isinstance(value, FunctionType):
        if hasattr(value, "__wrapped__") and _is_at_home(value.__wrapped__, home):
            return True
        if not _has_source(value):
            return not _is_versioned(_module_of(value))
    module = _module_of(value)
    return home is not None and module is not None and sources.together(home, module)

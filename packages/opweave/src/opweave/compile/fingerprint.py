"""Digests of kernels, ops and libraries, and what a function depends on.

:meth:`opweave.compile.plan.Plan.digest` and :mod:`opweave.compile.pipeline` combine them into the
cache keys of compiled graphs.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from inspect import CO_OPTIMIZED
from os.path import basename, dirname, isfile
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

import torch

from opweave import native
from opweave.ir import IrOp, IrOpImpl
from opweave.ir.dispatch import Callee
from opweave.ir.rules import Rule, TensorRule, custom_functions
from opweave.torch_compat import OpOverload, OpOverloadPacket

# The source files that a module depends on.


_IMPORT = dis.opmap["IMPORT_NAME"]
_PACKAGES = ("site-packages", "dist-packages")
_INSTALLED = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
_INSTALLED |= {folder for folder in sys.path if basename(folder) in _PACKAGES}  # from .pth files
_VERSIONED = {"torch", "triton", *sys.stdlib_module_names}
_NOTHING = compile("", "", "exec")


@cache
def files_of(module: ModuleType) -> Mapping[str, str]:
    """Return the files of a module and, transitively, of the modules that it uses, by module name.

    A module uses the modules that its names refer to and those that its functions import, even if
    they have not run yet. Modules of other installed packages are included without their own
    dependencies; torch, Triton and the standard library are not.
    """
    files: dict[str, str] = {}
    waiting = [module.__name__]
    while waiting:
        name = waiting.pop()
        if name in files or is_versioned(name) or (file := _file_of(name)) is None:
            continue
        files[name] = file
        if top_of(name) == top_of(module.__name__) or not _is_in_packages(file):
            waiting += _used_by(name, file, name in sys.modules)
    return dict(sorted(files.items()))


def together(module: ModuleType, other: ModuleType) -> bool:
    """Return whether two modules are in one package, or are scripts in one folder."""
    if top_of(module.__name__) == top_of(other.__name__):
        return True
    scripts = all(not m.__package__ for m in (module, other))
    return scripts and folder_of(module) == folder_of(other)


def is_versioned(name: str) -> bool:
    """Return whether a module is in torch, Triton or the standard library.

    Their versions are in the key, so their files are not.
    """
    return top_of(name) in _VERSIONED


def top_of(name: str) -> str:
    """Return the name of a module's top-level package."""
    return name.partition(".")[0]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions, lambdas and classes that it contains."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def imported_by(code: CodeType, package: str) -> Iterator[str]:
    """Yield the names of the modules that *code* may import; ``from a import b`` yields ``a.b``."""
    if _IMPORT not in code.co_code[::2]:  # disassembling is slow
        return
    steps = list(dis.get_instructions(code))
    for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opcode == _IMPORT:
            dots = "." * (level.argval or 0)
            try:
                base = resolve_name(dots + step.argval, package)
            except ImportError:  # a relative import beyond the top-level package
                continue
            yield base
            yield from (f"{base}.{name}" for name in names.argval or ())


def _file_of(name: str) -> str | None:
    """Return the file of a module, "" if it has no file, or None if *name* is not a module."""
    module = sys.modules.get(name)
    if module is None:
        return getattr(_spec_of(name), "origin", None)
    return getattr(module, "__file__", None) or ""


def _is_in_packages(file: str) -> bool:
    """Return whether a file is in site-packages, where the version identifies its content."""
    return any(file.startswith(folder + os.sep) for folder in _INSTALLED)


def _spec_of(name: str) -> ModuleSpec | None:
    """Find a module without importing its parents, which ``importlib.util.find_spec`` does."""
    parent = name.rpartition(".")[0]
    path = None
    if parent:
        package: Any = sys.modules.get(parent)
        parent_spec = getattr(package, "__spec__", None) if package else _spec_of(parent)
        path = getattr(parent_spec, "submodule_search_locations", None)
        if path is None:
            return None
    try:
        return PathFinder.find_spec(name, path) if name else None
    except KeyError:  # a namespace package whose parent is not imported
        spec = ModuleSpec(name, None, is_package=True)
        folders = [os.path.join(entry, name.rpartition(".")[2]) for entry in path or ()]
        spec.submodule_search_locations = [folder for folder in folders if os.path.isdir(folder)]
        return spec


@cache
def _used_by(name: str, file: str, is_loaded: bool) -> tuple[str, ...]:
    module = sys.modules[name] if is_loaded else None
    uses = [_origin(value) for value in list(vars(module).values())] if module else []
    spec = getattr(module, "__spec__", None) if module else _spec_of(name)
    package = getattr(module, "__package__", None) or getattr(spec, "parent", None) or ""
    for code in codes_in(_code_of(name, file, spec)):
        # The imports at the top level of a loaded module are among its names already.
        if module is None or code.co_flags & CO_OPTIMIZED:
            uses += imported_by(code, package)
    return tuple(dict.fromkeys(uses))


def _origin(value: object) -> str:
    """Return the name of a module, or of the module that defines a value.

    ``torch.ops.x`` is an instance of a subclass of ModuleType, and counts as a value.
    """
    return value.__name__ if type(value) is ModuleType else str(getattr(value, "__module__", ""))


def _code_of(name: str, file: str, spec: ModuleSpec | None) -> CodeType:
    try:
        loader: Any = getattr(spec, "loader", None)
        code = loader.get_code(name) if loader else compile(Path(file).read_bytes(), file, "exec")
    except Exception:  # a loader without get_code(), or a file with a syntax error
        return _NOTHING
    return code or _NOTHING  # an extension module has no code


def folder_of(module: ModuleType) -> str:
    """Return the folder of a script; the working directory for a notebook."""
    file = getattr(module, "__file__", None)
    return dirname(os.path.abspath(file)) if file else os.getcwd()


# Collect what the behavior of a function depends on, besides its arguments.


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

    - its bytecode, and its module with the files that it uses (:func:`files_of`);
    - its closure, defaults, and the arguments of a ``partial``;
    - the globals that it names: the identity of each function, class or module, the value of a
      constant, the facts about an object of the same package, without a source file or bound by a
      ``partial``, and the module of any other object.

    For torch and the standard library, the version is enough.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        self.facts: list[str] = []
        self.modules: dict[str, ModuleType] = {}
        self.installed: dict[str, ModuleType] = {}
        self.has_source = True  # whether every function has a source file
        self._met: dict[object, object] = {}  # by id; holding the values keeps their ids unique
        for function in functions:
            self.hold(function)

    @property
    def digest(self) -> str:
        """A digest of the facts and of the modules."""
        modules = [_of_module(module) for _, module in sorted(self.modules.items())]
        installed = [_of_installed(module) for _, module in sorted(self.installed.items())]
        return digest_of([*self.facts, *modules, *installed])

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
            self._all(function for function in inner if callable(function))

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
        if module is not None and _is_in_packages(getattr(module, "__file__", None) or ""):
            if not _is_versioned(module):
                self.installed[module.__name__] = module
        else:
            self._module(module)

    def _module(self, module: ModuleType | None) -> None:
        if module is not None and not _is_versioned(module):
            self.modules[module.__name__] = module


@lru_cache(maxsize=4096)
def _text_of(code: CodeType, package: str) -> _Text:
    codes = list(codes_in(code))
    facts = [
        (inner.co_name, inner.co_code, inner.co_names, *_constants_of(inner)) for inner in codes
    ]
    used = dict.fromkeys(name for inner in codes for name in inner.co_names)
    imported = [name for inner in codes for name in imported_by(inner, package)]
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
    return module is not None and is_versioned(module.__name__)


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
    return home is not None and module is not None and together(home, module)


# Digests of kernels, ops and libraries for cache keys.


_providers: list[Callable[[], str]] = []


def contribute(digest: Callable[[], str]) -> None:
    """Add ``digest()`` to every cache key.

    Keys already contain code, its source files and its constants. Contribute a digest if a kernel
    depends on anything else: files and environment variables that it reads, the contents of lists,
    dictionaries, tensors and objects, or names looked up with ``getattr`` or ``importlib``.
    """
    _providers.append(digest)


def of_op(op: IrOp) -> str:
    """Return a digest of an op's definition and all its implementations."""
    parts = [op.name, op.schema.torch, repr(op.activations), str(op.composite), str(op.autocast)]
    parts += [of_function(op.native), of_function(op.fake)]
    parts += [of_impl(impl) for impl in op.impls.values()]
    return digest_of(parts)


def of_impl(impl: IrOpImpl) -> str:
    """Return a digest of an implementation: its source, its helpers' source and its declarations.

    Code without a source file, as in a notebook, may have dependencies that cannot be found, so the
    digest changes each time the implementation is registered.
    """
    predicate = impl.supports_args
    rule = predicate if isinstance(predicate, Rule) else None
    functions = [*custom_functions(rule), *_called_by(rule)] if rule else [predicate]
    footprint = Footprint([impl.impl_fn, impl.functional_fn, *functions])
    facts = [impl.provider, str(impl.supported), str(impl.inplace), *sorted(impl.traits)]
    facts += [_rule_text(rule)] if rule else []
    facts += [] if footprint.has_source else [f"registration {impl.edition}"]
    return digest_of([*facts, footprint.digest])


def of_function(function: Any) -> str:
    """Return a digest of the dependencies of a function, see :class:`Footprint`."""
    return Footprint([function]).digest


@cache
def of_file(file: str | None) -> str:
    """Return a digest of a file's content, or an empty string if it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    except OSError:
        return ""


@lru_cache(maxsize=1)
def of_libraries() -> str:
    """Return a digest of the versions of Python, torch and opweave, and of the passes' source."""
    folder = Path(__file__).parent
    files = [*folder.rglob("*.py"), *(folder.parent / "ir").rglob("*.py")]
    files = [*sorted(files), *sorted(folder.parent.glob("*.py"))]
    version = importlib.metadata.version("opweave")
    return digest_of([torch.__version__, sys.version, version, *(of_file(str(f)) for f in files)])


def of_binaries() -> str:
    """Return a digest of the native modules that are loaded in this process."""
    modules = sorted(native.opened_modules().items())
    return digest_of(part for namespace, file in modules for part in (namespace, of_file(file)))


def of_contributions() -> str:
    """Return a digest of the contributions, see :func:`contribute`."""
    return digest_of(provider() for provider in _providers)


def digest_of(parts: Iterable[str]) -> str:
    """Return one digest of several strings."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(f"{len(part)}:".encode() + part.encode("utf-8", "surrogatepass"))
    return whole.hexdigest()


@cache
def _of_module(module: ModuleType) -> str:
    files = files_of(module).items()
    return digest_of(part for name, file in files for part in (_version_of(name), of_file(file)))


def _of_installed(module: ModuleType) -> str:
    name = module.__name__
    return digest_of([name, _version_of(name), of_file(module.__file__)])


def _version_of(name: str) -> str:
    """Return ``__version__`` of a module's top-level package if it is imported, else ""."""
    return str(getattr(sys.modules.get(top_of(name)), "__version__", ""))


def _called_by(rule: Rule) -> Iterator[Callable[..., Any]]:
    """Yield the functions among the constants of *rule* and of the rules that it combines."""
    for part in getattr(rule, "rules", ()):
        yield from _called_by(part)
    yield from filter(callable, getattr(rule, "constants", ()))


def _rule_text(rule: Rule) -> str:
    parts = getattr(rule, "rules", None)
    if parts is not None:
        return f"{type(rule).__name__}({', '.join(map(_rule_text, parts))})"
    public = {k: v for k, v in vars(rule).items() if not callable(v)}
    if isinstance(rule, TensorRule):  # functions are a part of the footprint
        public["constants"] = tuple(c for c in rule.constants if not callable(c))
    return f"{type(rule).__name__}{sorted((k, repr(v)) for k, v in public.items())}"

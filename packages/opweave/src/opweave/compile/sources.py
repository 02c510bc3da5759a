"""The source files that a module depends on."""

from __future__ import annotations

import dis
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from inspect import CO_OPTIMIZED
from os.path import basename, dirname
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

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
    found: dict[str, str] = {}
    waiting = [module.__name__]
    while waiting:
        name = waiting.pop()
        if name in found or is_versioned(name) or (file := _file_of(name)) is None:
            continue
        found[name] = file
        if top_of(name) == top_of(module.__name__) or not _is_in_packages(file):
            waiting += _used_by(name, file, name in sys.modules)
    return dict(sorted(found.items()))


def together(module: ModuleType, other: ModuleType) -> bool:
    """Return whether two modules are in one package, or are scripts in one folder."""
    if top_of(module.__name__) == top_of(other.__name__):
        return True
    scripts = all(not m.__package__ for m in (module, other))
    return scripts and folder_of(module) == folder_of(other)


def is_installed(module: ModuleType) -> bool:
    """Return whether a module is in site-packages, where the version identifies its content."""
    return _is_in_packages(getattr(module, "__file__", None) or "")


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
    return any(file.startswith(folder + os.sep) for folder in _INSTALLED)


def _spec_of(name: str) -> ModuleSpec | None:
    """Find a module without importing its parents, which ``importlib.util.find_spec`` does."""
    parent = name.rpartition(".")[0]
    path = None
    if parent:
        package: Any = sys.modules.get(parent)
        known = getattr(package, "__spec__", None) if package else _spec_of(parent)
        path = getattr(known, "submodule_search_locations", None)
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
    found = [_origin(value) for value in list(vars(module).values())] if module else []
    spec = getattr(module, "__spec__", None) if module else _spec_of(name)
    package = getattr(module, "__package__", None) or getattr(spec, "parent", None) or ""
    for code in codes_in(_code_of(name, file, spec)):
        # The imports at the top level of a loaded module are among its names already.
        if module is None or code.co_flags & CO_OPTIMIZED:
            found += imported_by(code, package)
    return tuple(dict.fromkeys(found))


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

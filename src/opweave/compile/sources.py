"""The source files that a module depends on: its own, and those of the modules that it uses."""

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
_INSTALLED |= {folder for folder in sys.path if basename(folder) in _PACKAGES}  # of .pth files
_VERSIONED = {"torch", "triton", *sys.stdlib_module_names}
_NOTHING = compile("", "", "exec")


@cache
def files_of(module: ModuleType) -> Mapping[str, str]:
    """Return the files, by name, of a module and, transitively, of those that it uses.

    Used is what its names refer to, and what its functions import when they run, whether that has
    happened yet or not. Modules of other packages that are installed are there, but not what those
    use; torch and Python's own library are not there.
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
    """Whether two modules are of one package, or two scripts in one folder."""
    if top_of(module.__name__) == top_of(other.__name__):
        return True
    scripts = all(not m.__package__ for m in (module, other))
    return scripts and folder_of(module) == folder_of(other)


def is_installed(module: ModuleType) -> bool:
    """Whether a module is in a folder for installed packages, whose versions tell them apart."""
    return _is_in_packages(getattr(module, "__file__", None) or "")


def is_versioned(name: str) -> bool:
    """Whether a module is torch's or of Python's own library, which count by their versions."""
    return top_of(name) in _VERSIONED


def top_of(name: str) -> str:
    """Return the name of the top-level package that a module is in."""
    return name.partition(".")[0]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions, lambdas and classes inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def imported_by(code: CodeType, package: str) -> Iterator[str]:
    """Yield the names of modules that *code* imports, and of others that may be none."""
    if _IMPORT not in code.co_code[::2]:
        return
    steps = list(dis.get_instructions(code))
    for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opcode == _IMPORT:
            dots = "." * (level.argval or 0)
            try:
                base = resolve_name(dots + step.argval, package)
            except ImportError:  # more dots than packages
                continue
            yield base
            yield from (f"{base}.{name}" for name in names.argval or ())


def _file_of(name: str) -> str | None:
    """Return the file of a module, empty if it has none; None if *name* is no module."""
    module = sys.modules.get(name)
    if module is None:
        return getattr(_spec_of(name), "origin", None)
    return getattr(module, "__file__", None) or ""


def _is_in_packages(file: str) -> bool:
    return any(file.startswith(folder + os.sep) for folder in _INSTALLED)


def _spec_of(name: str) -> ModuleSpec | None:
    """Find a module that nobody has imported, and import nothing, as importlib's would."""
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
    except KeyError:  # a namespace package asks for its parent, which nobody has imported
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
        # What a module has imported at its top is among its names.
        if module is None or code.co_flags & CO_OPTIMIZED:
            found += imported_by(code, package)
    return tuple(dict.fromkeys(found))


def _origin(value: object) -> str:
    """Return the module that a value is, or is from (torch.ops.x is of a subclass)."""
    return value.__name__ if type(value) is ModuleType else str(getattr(value, "__module__", ""))


def _code_of(name: str, file: str, spec: ModuleSpec | None) -> CodeType:
    try:
        loader: Any = getattr(spec, "loader", None)
        code = loader.get_code(name) if loader else compile(Path(file).read_bytes(), file, "exec")
    except Exception:  # a loader of another kind, or a file with errors
        return _NOTHING
    return code or _NOTHING  # (a binary has none)


def folder_of(module: ModuleType) -> str:
    """Return the folder of a script; that of a notebook is where its process runs."""
    file = getattr(module, "__file__", None)
    return dirname(os.path.abspath(file)) if file else os.getcwd()

"""What a compiled graph depends on besides the graph, as digests for the keys of caches."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from os.path import dirname
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from opweave import native
from opweave.ir import IrOp, IrOpImpl
from opweave.ir.impl import custom_functions
from opweave.ir.rule import Rule

_providers: list[Callable[[], str]] = []


def contribute(digest: Callable[[], str]) -> None:
    """Make ``digest()`` a part of every key: for data outside of Python that kernels depend on."""
    _providers.append(digest)


def of_op(op: IrOp) -> str:
    """Return a digest of an op's definition and all its implementations."""
    parts = [op.name, op.schema.torch, repr(op.activations), str(op.composite)]
    parts += [of_function(op.native), of_function(op.fake)]
    parts += [of_impl(impl) for impl in op.impls.values()]
    return digest_of(parts)


def of_impl(impl: IrOpImpl) -> str:
    """Return a digest of an implementation: its source, that of its helpers, and its promises."""
    functions: list[Any] = [impl.impl_fn]
    predicate = impl.supports_args
    if isinstance(predicate, Rule):
        functions += custom_functions(predicate)
    elif predicate is not None:
        functions.append(predicate)
    facts = [impl.provider, str(impl.supported), str(impl.inplace), *sorted(impl.traits)]
    rule = _rule_text(predicate) if isinstance(predicate, Rule) else ""
    return digest_of([*facts, rule, *map(of_function, functions)])


def of_function(function: Any) -> str:
    """Return a digest of the source files that a function's behaviour depends on.

    Those are its own and, transitively, those of the modules that it refers to in the same
    top-level package, or in the same folder if it is a script. A function without a source file
    counts by its bytecode and what it closes over.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    sources = of_modules(module) if module else ""
    return digest_of([_code_text(function), sources])


@cache
def of_modules(module: ModuleType) -> str:
    """Return a digest of a module's file and of those it uses in its own top-level package."""
    found: dict[str, ModuleType] = {}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current.__name__ not in found:
            found[current.__name__] = current
            waiting += _used_by(current)
    return digest_of(of_file(getattr(m, "__file__", None)) for _, m in sorted(found.items()))


@cache
def of_file(file: str | None) -> str:
    """Return a digest of a file's bytes; empty where there is none."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    except OSError:
        return ""


@lru_cache(maxsize=1)
def of_libraries() -> str:
    """Return a digest of the versions of torch and opweave, and of the passes themselves."""
    passes = sys.modules[__package__ or __name__]
    folder = Path(passes.__file__ or "").parent
    files = sorted(folder.rglob("*.py")) + sorted((folder.parent / "ir").rglob("*.py"))
    version = importlib.metadata.version("opweave")
    return digest_of([torch.__version__, version, *(of_file(str(f)) for f in files)])


def of_binaries() -> str:
    """Return a digest of the native modules in this process, which no Python source shows."""
    modules = sorted(native.opened_modules().items())
    return digest_of(part for namespace, file in modules for part in (namespace, of_file(file)))


def of_contributions() -> str:
    """Return a digest of what was contributed."""
    return digest_of(provider() for provider in _providers)


def digest_of(parts: Iterable[str]) -> str:
    """Return one digest of several strings."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(f"{len(part)}:".encode() + part.encode("utf-8", "surrogatepass"))
    return whole.hexdigest()


def _used_by(module: ModuleType) -> list[ModuleType]:
    used = []
    for value in vars(module).values():
        other = value
        if not isinstance(value, ModuleType):
            other = sys.modules.get(str(getattr(value, "__module__", "")))
        # (torch.ops.x is of a subclass)
        if type(other) is ModuleType and _belong_together(module, other):
            used.append(other)
    return used


def _belong_together(module: ModuleType, other: ModuleType) -> bool:
    """Whether two modules are of one package, or two scripts in one folder."""
    names = [m.__name__.partition(".")[0] for m in (module, other)]
    if names[0] == names[1]:
        return True
    scripts = all(not m.__package__ for m in (module, other))
    folders = [dirname(getattr(m, "__file__", None) or m.__name__) for m in (module, other)]
    return scripts and folders[0] == folders[1]


def _code_text(function: Any) -> str:
    if not isinstance(function, FunctionType):
        inner = getattr(function, "__func__", None) or getattr(function, "fn", None)
        return _code_text(inner) if inner is not None else str(type(function))
    code = function.__code__
    cells = [_cell_text(cell.cell_contents) for cell in function.__closure__ or ()]
    consts = [c for c in code.co_consts if isinstance(c, (int, float, str, bytes, type(None)))]
    return repr((function.__qualname__, code.co_code, consts, code.co_names, cells))


def _cell_text(value: Any) -> str:
    if isinstance(value, FunctionType):
        return _code_text(value)
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else ""


def _rule_text(rule: Rule) -> str:
    parts = getattr(rule, "rules", None)
    if parts is not None:
        return f"{type(rule).__name__}({', '.join(map(_rule_text, parts))})"
    public = {k: v for k, v in vars(rule).items() if not callable(v)}
    return f"{type(rule).__name__}{sorted((k, repr(v)) for k, v in public.items())}"

"""Digests of kernels, ops and libraries for cache keys."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opweave import native
from opweave.compile.footprint import Footprint
from opweave.compile.sources import files_of, top_of
from opweave.ir import IrOp, IrOpImpl
from opweave.ir.predicate import custom_functions
from opweave.ir.rule import Rule, TensorRule

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
    footprint = _footprint([impl.impl_fn, impl.functional_fn, *functions])
    facts = [impl.provider, str(impl.supported), str(impl.inplace), *sorted(impl.traits)]
    facts += [_rule_text(rule)] if rule else []
    facts += [] if footprint.has_source else [f"registration {impl.edition}"]
    return digest_of([*facts, _of_footprint(footprint)])


def of_function(function: Any) -> str:
    """Return a digest of the dependencies of a function, see :class:`Footprint`."""
    return _of_footprint(_footprint([function]))


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
    passes = sys.modules[__package__ or __name__]
    folder = Path(passes.__file__ or "").parent
    folders = folder, folder.parent / "ir", folder.parent / "base"
    files = [file for each in folders for file in sorted(each.rglob("*.py"))]
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


def _footprint(functions: Iterable[Any]) -> Footprint:
    footprint = Footprint()
    for function in functions:
        footprint.hold(function)
    return footprint


def _of_footprint(footprint: Footprint) -> str:
    modules = [_of_module(module) for _, module in sorted(footprint.modules.items())]
    installed = [_of_installed(module) for _, module in sorted(footprint.installed.items())]
    return digest_of([*footprint.facts, *modules, *installed])


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

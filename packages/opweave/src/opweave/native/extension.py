"""The description of a native module to build: names, sources and flags."""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opweave.base import compat
from opweave.ir.errors import did_you_mean
from opweave.native.errors import NativeBuildError

CUDA_SUFFIX = ".cu"
_SUFFIXES = (".cpp", ".cc", ".cxx", CUDA_SUFFIX)
_TAKEN = frozenset({"aten", "opweave", "opweave_c", "prim", "prims", "torch"})


@dataclass(frozen=True, slots=True)
class Extension:
    """A native module to build.

    ``module`` is the name of the Python module without its package, ``namespace`` that of its torch
    ops. ``simd_sources`` are compiled once per instruction set.
    """

    module: str
    namespace: str
    sources: tuple[Path, ...]
    simd_sources: tuple[Path, ...] = ()
    include_dirs: tuple[Path, ...] = ()
    cflags: tuple[str, ...] = ()
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()

    @property
    def filename(self) -> str:
        """The name of the module's file."""
        return f"{self.module}.abi3.so"

    @property
    def label(self) -> str:
        """The module's name for messages."""
        is_alone = self.module == self.namespace
        return self.module if is_alone else f"{self.namespace}.{self.module}"

    @property
    def all_sources(self) -> tuple[Path, ...]:
        """All source files."""
        return (*self.sources, *self.simd_sources)

    @property
    def has_cuda(self) -> bool:
        """Whether nvcc is needed."""
        return any(source.suffix == CUDA_SUFFIX for source in self.sources)


def check_name(name: str) -> str:
    """Return *name*; raise NativeBuildError unless it is valid for a module and a namespace."""
    fits = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", name)
    if not fits or keyword.iskeyword(name):
        raise NativeBuildError(
            f"{name!r} is not a valid name for a native module; use lowercase letters, digits and "
            "underscores, starting with a letter, but not a Python keyword."
        )
    # torch.ops also has attributes that are not namespaces, such as load_library.
    is_namespace = compat.is_op_namespace(getattr(torch.ops, name))
    if name in _TAKEN or not is_namespace:
        raise NativeBuildError(f"The name {name!r} is taken; choose another one.")
    return name


def check_list(value: object, what: str, item: str) -> tuple[Any, ...]:
    """Return *value* as a tuple of strings or, if *item* is "path", of strings and paths.

    Raises:
        TypeError: it is not an iterable of these, or is a single string or path.
    """
    kinds = (str, os.PathLike) if item == "path" else (str,)
    if isinstance(value, (*kinds, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{what} must be a list of {item}s, found {value!r}; write [{value!r}].")
    found = tuple(value)
    for element in found:
        if not isinstance(element, kinds):
            raise TypeError(f"{what} must be a list of {item}s, found {element!r} in it.")
        if "\0" in os.fspath(element):
            raise TypeError(f"{what} has {element!r}; commands cannot contain NUL characters.")
    return found


def check_sources(sources: Iterable[str | Path]) -> tuple[Path, ...]:
    """Return *sources* as absolute paths.

    Raises:
        NativeBuildError: the list is empty, a file does not exist, or is not C++ or CUDA.
    """
    found = _check_files(sources)
    if not found:
        raise NativeBuildError("There are no sources to build.")
    return found


def check_simd_sources(sources: Iterable[str | Path]) -> tuple[Path, ...]:
    """Return *sources*, to be compiled once per instruction set, as absolute paths.

    Raises:
        NativeBuildError: a file does not exist or is not C++.
    """
    found = _check_files(sources)
    for path in found:
        if path.suffix == CUDA_SUFFIX:
            raise NativeBuildError(f"{path} is CUDA, but SIMD sources are for the CPU's vectors.")
    return found


def _check_files(sources: Iterable[str | Path]) -> tuple[Path, ...]:
    found = tuple(Path(source).absolute() for source in sources)
    for path in found:
        if path.suffix not in _SUFFIXES:
            raise NativeBuildError(f"{path} is not a source file ({', '.join(_SUFFIXES)}).")
        if path.is_dir():
            raise NativeBuildError(f"{path} is a folder; name the source files in it.")
        if not path.is_file():
            nearby = [p.name for p in path.parent.glob("*") if p.suffix in _SUFFIXES]
            raise NativeBuildError(
                f"The source file {path} does not exist. {did_you_mean(path.name, nearby)}"
            )
    return found

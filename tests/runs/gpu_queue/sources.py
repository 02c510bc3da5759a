"""Dependencies of a job: source files, the modules that they import, and a digest of all."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from gpu_queue.job import ROOT, Job

SRC = ROOT / "packages" / "opweave" / "src"  # kernels and their definitions


def digest_of(job: Job) -> str:
    """Return a digest of the sources and the arguments of *job*."""
    digest = hashlib.sha256(f"{job.body} {sorted(job.arguments.items())}".encode())
    for path in sorted(set(job.sources() if callable(job.sources) else job.sources)):
        digest.update(_file_digest(path))
    return digest.hexdigest()[:16]


@cache
def _file_digest(path: Path) -> bytes:
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return hashlib.sha256(f"{name}\0".encode() + path.read_bytes()).digest()


def files_in(*folders: str) -> tuple[Path, ...]:
    """Return the Python files in folders of the repository."""
    return tuple(file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))


def closure(files: Iterable[Path], within: tuple[str, ...]) -> tuple[Path, ...]:
    """Return *files* and every module that they import, directly or not.

    Args:
        within: packages, as ``opweave.kernels``; imports from others are not followed.
    """
    found: dict[Path, None] = {}
    waiting = [file.resolve() for file in files]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = None
            waiting += [
                path
                for module in _imports(file)
                if module.startswith(within)
                for path in _files_of(module)
            ]
    return tuple(found)


@cache
def _imports(file: Path) -> frozenset[str]:
    """Return the absolute names of what *file* imports: modules, or names in them."""
    return frozenset(_imported(ast.parse(file.read_text(encoding="utf-8")), file))


def _imported(tree: ast.AST, file: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{alias.name}" for alias in names)
            # Triton's kernels are imported at the first call: opweave.kernels.triton.launch.
            case ast.Call(func=ast.Name(id="Kernels"), args=[ast.Constant(value=str(name))]):
                package = ".".join(file.parent.relative_to(SRC.resolve()).parts)
                yield f"{package}.jit.{name}"


def _files_of(name: str) -> Iterator[Path]:
    """Yield the file of a module, or of the module that has the name."""
    for parts in (name.split("."), name.split(".")[:-1]):
        path = SRC.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                yield file.resolve()
                return

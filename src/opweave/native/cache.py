"""Built modules, kept under a hash of everything that they were built from."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opweave.native import builder, kit, toolchain
from opweave.native.errors import NativeBuildError
from opweave.native.extension import Extension

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Built:
    """A built module: its file, the hash of what it came from, and whether it was there before."""

    path: Path
    key: str
    cached: bool


def cache_dir() -> Path:
    """Return where built modules are kept: ``OPWEAVE_CACHE_DIR``, or ``~/.cache/opweave``."""
    chosen = os.environ.get("OPWEAVE_CACHE_DIR")
    return Path(chosen).absolute() if chosen else Path.home() / ".cache" / "opweave"


def build(extension: Extension, *, verbose: bool = False) -> Built:
    """Build *extension*, unless the cache has it. Processes that want the same one wait for it.

    Raises:
        NativeBuildError: it cannot be built.
    """
    key = content_key(extension)
    folder = _folder(f"{extension.namespace}-{key}")
    target = folder / extension.filename
    if target.is_file():
        return Built(target, key, cached=True)
    with _locked(folder):
        if target.is_file():  # another process built it meanwhile
            return Built(target, key, cached=True)
        objects = _kit_objects(verbose=verbose)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            os.replace(builder.build(extension, objects, Path(scratch), verbose=verbose), target)
    return Built(target, key, cached=False)


def content_key(extension: Extension) -> str:
    """Return a hash of the sources, their headers, the flags, the compilers and the kit."""
    compilers = [toolchain.cxx()] + ([toolchain.nvcc()] if extension.has_cuda else [])
    files = [*extension.sources, *headers(extension)]
    return _hash(
        [extension.module, extension.namespace],
        [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files],
        builder.flags(extension),
        [[*compiler.command, compiler.version] for compiler in compilers],
        [platform.machine(), _processor(extension), kit.fingerprint()],
    )


def headers(extension: Extension) -> list[Path]:
    """Return every file that the sources include, directly or not, from the user's folders."""
    given = [flag[2:] for flag in extension.cflags + extension.cuda_cflags if flag[:2] == "-I"]
    folders = [*extension.include_dirs, *(Path(path) for path in given if path)]
    found: dict[Path, None] = {}
    waiting = list(extension.sources)
    while waiting:
        source = waiting.pop()
        for match in _INCLUDE.finditer(source.read_bytes()):
            name = os.fsdecode(match.group(1))
            for path in {(f / name).resolve() for f in (source.parent, *folders)}:
                if path not in found and path.is_file():
                    found[path] = None
                    waiting.append(path)
    return sorted(found)


def _processor(extension: Extension) -> str:
    """Return what the processor can do, if the compiler is told to use all of it."""
    if not any("native" in flag for flag in (*extension.cflags, *extension.cuda_cflags)):
        return ""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Feat"))), "")


def _kit_objects(*, verbose: bool) -> Path:
    """Return the folder with the compiled kit, compiling it if it is not there."""
    compiler = toolchain.cxx()
    key = _hash([*compiler.command, compiler.version], builder.kit_flags(), [kit.fingerprint()])
    folder = _folder(f"kit-{key}")
    objects = folder / "objects"
    if not objects.is_dir():
        with _locked(folder):
            if not objects.is_dir():
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    fresh = Path(scratch) / "objects"
                    fresh.mkdir()
                    builder.compile_kit(fresh, verbose=verbose)
                    os.replace(fresh, objects)
    return objects


def _folder(name: str) -> Path:
    folder = cache_dir() / "native" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NativeBuildError(
            f"Cannot write the cache folder {folder}: {error.strerror}; set OPWEAVE_CACHE_DIR to "
            "one that you can write."
        ) from error
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, even by a crash
        yield


def _hash(*parts: Iterable[object]) -> str:
    text = json.dumps([list(part) for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:24]

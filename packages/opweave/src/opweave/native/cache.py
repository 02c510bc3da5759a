"""Cache of built modules, keyed by a hash of everything that they were built from."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from opweave.native import builder, folders, inputs, kit, toolchain, trial
from opweave.native.errors import NativeBuildError
from opweave.native.extension import Extension

_MANIFEST = "files.json"
_OWN = "."  # key of the built file's own digest in a manifest


@dataclass(frozen=True, slots=True)
class Built:
    """A built module: its file, the hash of its inputs, and whether it came from the cache."""

    path: Path
    key: str
    cached: bool


def build(extension: Extension, *, verbose: bool = False) -> Built:
    """Build *extension*, unless it is cached. Concurrent builds of the same module wait.

    Raises:
        NativeBuildError: it cannot be built.
    """
    key = content_key(extension)
    folder = folders.folder(f"{extension.namespace}-{key}")
    found = _find(folder, extension.filename)
    cached = found is not None
    if found is None:
        with folders.locked(folder):
            found = _find(folder, extension.filename)  # another process may have built it
            cached = found is not None
            found = found or _build_in(folder, extension, verbose=verbose)
    return Built(found, f"{key}-{found.parent.name}", cached=cached)


def content_key(extension: Extension) -> str:
    """Return a hash of the inputs known before a build: sources, flags, compilers, the kit.

    Files that the compilers read besides are in the manifest, and compared one by one.
    """
    compilers = [toolchain.cxx()] + ([toolchain.nvcc()] if extension.has_cuda else [])
    given = [flag for compiler in compilers for flag in compiler.command[1:]]
    return _hash(
        [extension.module, extension.namespace],
        [[str(path), _source_digest(path)] for path in extension.sources],
        [[str(path), _source_digest(path)] for path in extension.simd_sources],
        [[str(path), inputs.digest(path)] for path in inputs.named(extension)],
        builder.flags(extension),
        inputs.environment(),
        [[*compiler.command, compiler.version] for compiler in compilers],
        [platform.machine(), _processor(*given, *extension.cflags, *extension.cuda_cflags)],
        [kit.fingerprint()],
    )


def _source_digest(path: Path) -> str:
    found = inputs.digest(path)
    if not found:
        raise NativeBuildError(f"Cannot read the source {path}; check its permissions.")
    return found


def _find(folder: Path, filename: str) -> Path | None:
    """Return the module in *folder* whose inputs are unchanged, if there is one."""
    digest = functools.cache(inputs.digest)
    for manifest in folder.glob(f"*/{_MANIFEST}"):
        files = _read_manifest(manifest)
        target = manifest.with_name(filename)
        own = files.pop(_OWN, None)
        if own is None or own != inputs.digest(target):  # damaged or removed
            continue
        if all(digest(path) == known for path, known in files.items()):
            return target
    return None


def _read_manifest(path: Path) -> dict[str, str]:
    """Return the digests in a manifest by path; empty if it cannot be read."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return files if isinstance(files, dict) else {}


def _build_in(folder: Path, extension: Extension, *, verbose: bool) -> Path:
    """Build *extension* into a new folder in *folder*, which appears atomically."""
    objects = _kit_objects(verbose=verbose)
    with folders.scratch(folder) as scratch:
        began = scratch.stat().st_ctime_ns
        built = builder.build(extension, objects, scratch, verbose=verbose)
        trial.check(extension, built)
        own = (f"{scratch}{os.sep}", f"{objects}{os.sep}")
        read = (path for path in inputs.listed(scratch) if not path.startswith(own))
        files = {path: _read_digest(path, began) for path in read}
        ready = scratch / "ready"
        ready.mkdir()
        target = folder / _hash(files.items())
        manifest = {_OWN: inputs.digest(built), **files}
        (ready / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        built.rename(ready / built.name)
        shutil.rmtree(target, ignore_errors=True)  # a damaged earlier build
        ready.rename(target)
    return target / built.name


def _read_digest(path: str, began: int) -> str:
    """Return the digest of a file that a build read.

    If the file was written after the build *began*, the compiler may have read other contents, so
    return a value that equals no digest.
    """
    try:
        was_there = os.stat(path).st_ctime_ns <= began
    except OSError:
        was_there = False
    return inputs.digest(path) if was_there else f"written since {began}"


def _processor(*flags: str) -> str:
    """Return the CPU's features if *flags* contain something like ``-march=native``."""
    if not any("native" in flag for flag in flags):
        return ""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Feat"))), "")


def _kit_objects(*, verbose: bool) -> Path:
    """Return the folder of the compiled kit; compile the kit if necessary."""
    compiler = toolchain.cxx()
    key = _hash(
        [*compiler.command, compiler.version],
        builder.kit_flags(),
        inputs.environment(),
        [_processor(*compiler.command[1:]), kit.fingerprint()],
    )
    folder = folders.folder(f"kit-{key}")
    objects = folder / "objects"
    if not _is_whole(objects):
        with folders.locked(folder):
            if not _is_whole(objects):
                with folders.scratch(folder) as scratch:
                    fresh = scratch / "objects"
                    fresh.mkdir()
                    builder.compile_kit(fresh, verbose=verbose)
                    manifest = {path.name: inputs.digest(path) for path in fresh.glob("*.o")}
                    (fresh / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
                    shutil.rmtree(objects, ignore_errors=True)  # damaged earlier objects
                    fresh.rename(objects)
    return objects


def _is_whole(objects: Path) -> bool:
    """Whether all files that were compiled into the folder *objects* are unchanged."""
    files = _read_manifest(objects / _MANIFEST)
    return bool(files) and all(
        inputs.digest(objects / name) == known for name, known in files.items()
    )


def _hash(*parts: Iterable[object]) -> str:
    text = json.dumps([list(part) for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:24]

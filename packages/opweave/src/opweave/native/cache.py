"""Cache of built modules, keyed by a hash of everything that they were built from."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opweave.native import builder, calls, toolchain
from opweave.native.builder import Extension
from opweave.native.toolchain import NativeBuildError

# The folders of the build cache: location, locks and cleanup.


_SCRATCH_PREFIX = "tmp"


def cache_dir() -> Path:
    """Return the cache folder: ``OPWEAVE_CACHE_DIR``, or ``~/.cache/opweave``.

    Raises:
        NativeBuildError: the user has no home folder, and the folder in its place is not safe.
    """
    chosen = os.environ.get("OPWEAVE_CACHE_DIR")
    if chosen:
        return Path(os.path.expanduser(chosen)).absolute()
    try:
        return Path.home() / ".cache" / "opweave"
    except RuntimeError:  # a user id without a name, as in containers
        return _own_folder(Path(tempfile.gettempdir()) / f"opweave-{os.getuid()}")


def _own_folder(folder: Path) -> Path:
    """Create *folder* in a shared folder; it must belong to this user, as its files are run."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise NativeBuildError(
            f"There is no home folder for the cache, and {folder} cannot be created: "
            f"{error.strerror}; set OPWEAVE_CACHE_DIR to a writable folder."
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeBuildError(
            f"There is no home folder for the cache, and other users can write to {folder}; set "
            "OPWEAVE_CACHE_DIR to a folder of your own."
        )
    return folder


def cache_folder(name: str) -> Path:
    """Return the folder *name* of the cache; create it if necessary.

    Raises:
        NativeBuildError: it cannot be created.
    """
    path = cache_dir() / "native" / name
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Provide a temporary folder in *folder*, which must be locked.

    Raises:
        NativeBuildError: it cannot be written.
    """
    with _writing(folder), tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH_PREFIX) as name:
        yield Path(name)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of *folder*; wait until no other process builds in it.

    Raises:
        NativeBuildError: the lock file cannot be written.
    """
    with _writing(folder), open(folder / "lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
        _sweep(folder)
        yield


def _sweep(mine: Path) -> None:
    """Remove scratch folders of killed builds, in *mine* and in unlocked folders."""
    for left in mine.parent.glob(f"*/{_SCRATCH_PREFIX}*"):
        with suppress(OSError), open(left.parent / "lock", "w", encoding="utf-8") as file:
            if left.parent != mine:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NativeBuildError(
            f"Cannot write the cache folder {folder}: {error.strerror}; set OPWEAVE_CACHE_DIR to a "
            "writable folder."
        ) from error


# Trial load of a new module in another process, where a crash does no harm.


# Imports torch, which takes seconds, only if the module is linked against it.
_LOAD_SCRIPT = """
import importlib.util, json, sys
from importlib.machinery import ExtensionFileLoader
name, path, folders = sys.argv[1:]
def load():
    loader = ExtensionFileLoader(name, path)
    return importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
try:
    try:
        raw = load()
    except ImportError:
        sys.path[:] = json.loads(folders)
        import torch
        raw = load()
    schemas = {op: getattr(raw, op).__doc__ for op in dir(raw) if op[0] != "_"}
    answer = {"schemas": schemas}
except ImportError as error:
    answer = {"error": str(error)}
print("\\nopweave: " + json.dumps(answer), flush=True)
"""
_OUTPUT_PREFIX = "opweave: "  # the module may print other lines when it loads or Python exits

# Symbols of the C++ library, which a C compiler does not link.
_CXX_SYMBOLS = ("__cxxabiv1", "__cxa_", "__gxx_", "symbol: _ZSt", "symbol: _ZNSt", "symbol: _Zn")


def check(extension: Extension, path: Path) -> None:
    """Check that the module at *path* loads and that torch accepts the schemas of its ops.

    Raises:
        NativeBuildError: one of these fails.
    """
    command = (sys.executable, "-I", "-S", "-c", _LOAD_SCRIPT, extension.module, str(path))
    answer = _answer(toolchain.run((*command, json.dumps(sys.path))))
    why = answer.get("error", "").removeprefix(f"{path}: ")
    if any(symbol in why for symbol in _CXX_SYMBOLS):
        compiler = toolchain.cxx().command[0]
        why += f"; {compiler} does not link the C++ library: name a C++ compiler, such as CXX=g++"
    why = why or calls.refusal(answer.get("schemas", {}), extension.namespace)
    if why:
        raise NativeBuildError(f"{extension.label} is built but does not load: {why}.")


def _answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = [line for line in done.stdout.splitlines() if line.startswith(_OUTPUT_PREFIX)]
    if not lines:  # it crashed
        last = done.stderr.strip().splitlines()[-1:]
        return {"error": last[0] if last else f"Python ended with {done.returncode}"}
    answer: dict[str, Any] = json.loads(lines[0].removeprefix(_OUTPUT_PREFIX))
    if "error" not in answer and done.returncode != 0:
        code = done.returncode
        end = signal.Signals(-code).name if code < 0 else f"code {code}"
        answer["error"] = f"when Python exits, it ends with {end}"
    return answer


# Lookup of built modules, and builds of missing ones.


_MANIFEST = "files.json"
_MODULE_KEY = "."  # key of the built module's digest in a manifest


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
    folder = cache_folder(f"{extension.namespace}-{key}")
    path = _find(folder, extension.filename)
    cached = path is not None
    if path is None:
        with locked(folder):
            path = _find(folder, extension.filename)  # another process may have built it
            cached = path is not None
            path = path or _build_in(folder, extension, verbose=verbose)
    return Built(path, f"{key}-{path.parent.name}", cached=cached)


def content_key(extension: Extension) -> str:
    """Return a hash of the inputs known before a build: sources, flags, compilers, the kit.

    The manifest lists the other files that the compilers read, which are compared one by one.
    """
    compilers = [toolchain.cxx()] + ([toolchain.nvcc()] if extension.has_cuda else [])
    compiler_flags = [flag for compiler in compilers for flag in compiler.command[1:]]
    flags = (*compiler_flags, *extension.cflags, *extension.cuda_cflags)
    return _hash(
        [extension.module, extension.namespace],
        [[str(path), _source_digest(path)] for path in extension.sources],
        [[str(path), _source_digest(path)] for path in extension.simd_sources],
        [[str(path), builder.digest(path)] for path in builder.named(extension)],
        builder.flags(extension),
        builder.environment(),
        [[*compiler.command, compiler.version] for compiler in compilers],
        [platform.machine(), _processor(*flags)],
        [toolchain.fingerprint()],
    )


def _source_digest(path: Path) -> str:
    digest = builder.digest(path)
    if not digest:
        raise NativeBuildError(f"Cannot read the source {path}; check its permissions.")
    return digest


def _find(folder: Path, filename: str) -> Path | None:
    """Return the module in *folder* whose inputs are unchanged, if there is one."""
    digest = functools.cache(builder.digest)
    for manifest in folder.glob(f"*/{_MANIFEST}"):
        files = _read_manifest(manifest)
        target = manifest.with_name(filename)
        module_digest = files.pop(_MODULE_KEY, None)
        if module_digest is None or module_digest != builder.digest(target):  # damaged or removed
            continue
        if all(digest(path) == recorded for path, recorded in files.items()):
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
    with scratch_folder(folder) as scratch:
        began = scratch.stat().st_ctime_ns
        built = builder.build(extension, objects, scratch, verbose=verbose)
        check(extension, built)
        internal = (f"{scratch}{os.sep}", f"{objects}{os.sep}")
        read = (path for path in builder.listed(scratch) if not path.startswith(internal))
        files = {path: _read_digest(path, began) for path in read}
        ready = scratch / "ready"
        ready.mkdir()
        target = folder / _hash(files.items())
        manifest = {_MODULE_KEY: builder.digest(built), **files}
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
    return builder.digest(path) if was_there else f"written since {began}"


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
        builder.KIT_FLAGS,
        builder.environment(),
        [_processor(*compiler.command[1:]), toolchain.fingerprint()],
    )
    folder = cache_folder(f"kit-{key}")
    objects = folder / "objects"
    if not _is_whole(objects):
        with locked(folder):
            if not _is_whole(objects):
                with scratch_folder(folder) as scratch:
                    fresh = scratch / "objects"
                    fresh.mkdir()
                    builder.compile_kit(fresh, verbose=verbose)
                    manifest = {path.name: builder.digest(path) for path in fresh.glob("*.o")}
                    (fresh / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
                    shutil.rmtree(objects, ignore_errors=True)  # damaged earlier objects
                    fresh.rename(objects)
    return objects


def _is_whole(objects: Path) -> bool:
    """Whether all files that were compiled into the folder *objects* are unchanged."""
    files = _read_manifest(objects / _MANIFEST)
    return bool(files) and all(builder.digest(objects / name) == files[name] for name in files)


def _hash(*parts: Iterable[object]) -> str:
    text = json.dumps([list(part) for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:24]

"""Builds of native modules, just in time and ahead of time."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import threading
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from opweave.ir.errors import did_you_mean
from opweave.native import builder, cache
from opweave.native.cache import Built
from opweave.native.calls import NativeModule
from opweave.native.toolchain import NativeBuildError

# Just-in-time builds of native modules.


_lock = threading.Lock()
_loaded: dict[str, tuple[str, NativeModule]] = {}


def load(
    name: str,
    sources: Iterable[str | Path],
    *,
    extra_cflags: Sequence[str] = (),
    extra_cuda_cflags: Sequence[str] = (),
    extra_ldflags: Sequence[str] = (),
    include_dirs: Iterable[str | Path] = (),
    simd_sources: Iterable[str | Path] = (),
    verbose: bool = False,
) -> NativeModule:
    """Build the native module *name* from *sources*, unless it is cached, and load it.

    The sources register ops with ``OPWEAVE_EXTENSION_MODULE`` from ``<opweave/extension.h>``. Each
    op is a function of the returned module, and ``torch.ops.<name>.<op>``.

    Modules are cached in ``OPWEAVE_CACHE_DIR`` (by default ``~/.cache/opweave``), and rebuilt if a
    source, header, library, flag, the compiler or opweave changes.

    Args:
        name: name of the module and of the torch namespace.
        sources: C++ files, and CUDA files (``.cu``) for nvcc.
        extra_cflags: flags for the C++ compiler.
        extra_cuda_cflags: flags for nvcc.
        extra_ldflags: flags for linking.
        include_dirs: folders of headers.
        simd_sources: C++ files that are compiled once per instruction set, see
            ``<opweave/simd.h>``.
        verbose: print the compiler's commands and messages.

    Raises:
        NativeBuildError: a compiler or a source is missing, compilation fails, a schema is invalid,
            or this process has loaded *name* from other sources.
        TypeError: *sources*, *simd_sources*, *include_dirs* or flags are not lists.
    """
    folders = builder.check_list(include_dirs, "include_dirs", "path")
    vectorized = builder.check_list(simd_sources, "simd_sources", "path")
    extension = builder.Extension(
        module=builder.check_name(name),
        namespace=name,
        sources=builder.check_sources(builder.check_list(sources, "sources", "path")),
        simd_sources=builder.check_simd_sources(vectorized),
        include_dirs=tuple(Path(folder).absolute() for folder in folders),
        cflags=builder.check_list(extra_cflags, "extra_cflags", "string"),
        cuda_cflags=builder.check_list(extra_cuda_cflags, "extra_cuda_cflags", "string"),
        ldflags=builder.check_list(extra_ldflags, "extra_ldflags", "string"),
    )
    built = cache.build(extension, verbose=verbose)
    with _lock:
        if name not in _loaded:
            _loaded[name] = built.key, _load(name, built.path)
        key, module = _loaded[name]
    if key != built.key:
        raise NativeBuildError(
            f"A native module {name!r} from other sources or flags is already loaded in this "
            "process, and Python cannot unload it; use another name, or restart Python."
        )
    return module


def _load(name: str, path: Path) -> NativeModule:
    loader = ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, path
    before = sys.modules.get(name)
    try:
        raw = importlib.util.module_from_spec(spec)
        loader.exec_module(raw)
        return NativeModule(name, name, raw)
    except ImportError as error:
        raise NativeBuildError(f"{name} is built but does not load: {error}.") from error
    finally:  # the import adds the module there, and may have replaced another
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before


# Ahead-of-time builds of a package's native module, configured in its pyproject.toml.


_TABLE = "[tool.opweave-native]"
_LISTS = ("sources", "simd-sources", "include-dirs", "cflags", "cuda-cflags", "ldflags")


def build(folder: str | Path, *, verbose: bool = False) -> Built:
    """Build the native module of the package in *folder*, and copy it into the package.

    ``[tool.opweave-native]`` in ``pyproject.toml`` configures the build: ``module`` (such as
    ``demo._C_ops``), ``sources`` (patterns), and optionally ``simd-sources`` (patterns of files to
    compile once per instruction set; they are not ``sources``), ``include-dirs``, ``cflags``,
    ``cuda-cflags`` and ``ldflags``. Uses the cache if nothing has changed.

    Raises:
        NativeBuildError: the table is missing or wrong, or the build fails.
    """
    folder = Path(folder).absolute()
    table = _read(folder / "pyproject.toml")
    package, _, module = table["module"].rpartition(".")
    target = _package_folder(folder, package)
    if (target / f"{module}.py").exists():
        raise NativeBuildError(
            f"The module {table['module']} would shadow {target / module}.py; choose another name."
        )
    vectorized = _expand(folder, table["simd-sources"])
    extension = builder.Extension(
        module=module,
        namespace=builder.check_name(package.replace(".", "_")),
        sources=builder.check_sources(
            path for path in _expand(folder, table["sources"]) if path not in vectorized
        ),
        simd_sources=builder.check_simd_sources(vectorized),
        include_dirs=tuple(folder / path for path in table["include-dirs"]),
        cflags=tuple(table["cflags"]),
        cuda_cflags=tuple(table["cuda-cflags"]),
        ldflags=tuple(table["ldflags"]),
    )
    built = cache.build(extension, verbose=verbose)
    return Built(_place(built.path, target), built.key, built.cached)


def setup(folder: str | Path) -> None:
    """Build the native module of the package in *folder*, and run setuptools: for its ``setup.py``.

    The wheel is for every CPython since 3.10. On Linux, its tag names the glibc that the module
    needs, as package indexes require. Modules with ``ldflags`` keep the tag of this machine, since
    the libraries that they need may be missing elsewhere.

    Raises:
        NativeBuildError: as for :func:`build`.
    """
    import setuptools  # type: ignore[import-untyped]

    built = build(folder)
    options = {"py_limited_api": "cp310"}
    if not _read(Path(folder, "pyproject.toml"))["ldflags"] and (tag := _manylinux(built.path)):
        options["plat_name"] = tag
    setuptools.setup(has_ext_modules=lambda: True, options={"bdist_wheel": options})


def _manylinux(module: Path) -> str | None:
    """Return the platform tag for the oldest glibc that *module* runs with; None without glibc."""
    versions = re.findall(rb"GLIBC_2\.(\d+)", module.read_bytes())
    if not versions:
        return None
    machine = sysconfig.get_platform().removeprefix("linux-")
    # 2.17 is the oldest that has a tag on every architecture.
    return f"manylinux_2_{max(17, *map(int, versions))}_{machine}"


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NativeBuildError(
            f"{path} does not exist; `opweave new NAME --kernel cpp` creates a package."
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise NativeBuildError(f"Cannot read {path}: {error}.") from error
    tool = content.get("tool", {})
    if not isinstance(tool, dict):
        raise NativeBuildError(f"{path}: tool must be a table, found {tool!r}.")
    table = tool.get("opweave-native")
    if table is None:
        raise NativeBuildError(f"{path} has no table {_TABLE}, which configures the build.")
    if not isinstance(table, dict):
        raise NativeBuildError(f"{path}: {_TABLE} must be a table, found {table!r}.")
    for key in table:
        if key not in ("module", *_LISTS):
            raise NativeBuildError(
                f"{path}: {_TABLE} has an unknown key {key!r}. "
                f"{did_you_mean(key, ('module', *_LISTS))}"
            )
    module = table.get("module")
    if not isinstance(module, str) or not all(
        name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
        for name in module.split(".")
    ):
        raise NativeBuildError(
            f"{path}: {_TABLE} needs module = 'package._C_ops', found {module!r}; names must be "
            "ASCII letters, digits and underscores, but not Python keywords."
        )
    if "." not in module:
        raise NativeBuildError(
            f"{path}: module = {module!r} does not name a package; try '{module}._C_ops'."
        )
    lists = {key: table.get(key, []) for key in _LISTS}
    for key, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise NativeBuildError(f"{path}: {key} must be a list of strings, found {value!r}.")
    return {"module": module, **lists}


def _expand(folder: Path, patterns: list[str]) -> list[Path]:
    sources: dict[Path, None] = {}
    for pattern in patterns:
        try:
            matches = sorted(folder.glob(pattern))
        except (ValueError, NotImplementedError, OSError) as error:
            raise NativeBuildError(
                f"The source {pattern!r} is not a valid pattern for files in {folder}, such as "
                f"'csrc/*.cpp': {error}."
            ) from error
        if not matches:
            raise NativeBuildError(f"No file in {folder} matches the source {pattern!r}.")
        sources.update(dict.fromkeys(matches))
    return list(sources)


def _package_folder(folder: Path, package: str) -> Path:
    candidates = [folder / "src", folder]
    for root in candidates:
        path = root.joinpath(*package.split("."))
        if path.is_dir():
            return path
    raise NativeBuildError(
        f"The package {package!r} was not found in {', '.join(map(str, candidates))}."
    )


def _place(built: Path, folder: Path) -> Path:
    """Copy *built* into *folder* atomically; processes that have loaded it keep the old file."""
    target = folder / built.name
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
            os.replace(shutil.copy(built, scratch), target)
    except OSError as error:
        raise NativeBuildError(f"Cannot write {target}: {error.strerror}.") from error
    return target

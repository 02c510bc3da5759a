"""Just-in-time builds of native modules."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterable, Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

from opweave.native import cache
from opweave.native.call_paths import NativeModule
from opweave.native.errors import NativeBuildError
from opweave.native.extension import (
    Extension,
    check_list,
    check_name,
    check_simd_sources,
    check_sources,
)

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
    folders = check_list(include_dirs, "include_dirs", "path")
    extension = Extension(
        module=check_name(name),
        namespace=name,
        sources=check_sources(check_list(sources, "sources", "path")),
        simd_sources=check_simd_sources(check_list(simd_sources, "simd_sources", "path")),
        include_dirs=tuple(Path(folder).absolute() for folder in folders),
        cflags=check_list(extra_cflags, "extra_cflags", "string"),
        cuda_cflags=check_list(extra_cuda_cflags, "extra_cuda_cflags", "string"),
        ldflags=check_list(extra_ldflags, "extra_ldflags", "string"),
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

"""The headers and sources of the kit, which are part of the package."""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path

from opweave.native.errors import NativeBuildError

# For builds without these commands, and for opweave's own module.
_UNUSED = ("module_init.cpp", "plain_call.cpp")


def include_dir() -> Path:
    """Return the folder that holds ``opweave/extension.h``, for ``-I``.

    Raises:
        NativeBuildError: the headers are not installed.
    """
    # In an editable install, CMake installs its files apart from the Python files.
    folders = list(sys.modules[__name__.partition(".")[0]].__path__)
    for folder in folders:
        if (Path(folder) / "include" / "opweave" / "extension.h").is_file():
            return Path(folder) / "include"
    raise NativeBuildError(
        f"opweave/extension.h was not found in {', '.join(folders)}; reinstall opweave."
    )


def core_sources() -> list[Path]:
    """Return the kit's sources that all modules share."""
    found = sorted((include_dir() / "opweave").glob("*.cpp"))
    return [path for path in found if path.name not in _UNUSED]


@functools.cache
def fingerprint() -> str:
    """Return a hash of every file of the kit."""
    digest = hashlib.sha256()
    folder = include_dir() / "opweave"
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".h", ".cpp"):
            name = path.relative_to(folder).as_posix()
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()

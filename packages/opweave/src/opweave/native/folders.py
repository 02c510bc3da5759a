"""The folders of the build cache: location, locks and cleanup."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from opweave.native.errors import NativeBuildError

_SCRATCH = "tmp"


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
        found = folder.lstat()
    except OSError as error:
        raise NativeBuildError(
            f"There is no home folder for the cache, and {folder} cannot be created: "
            f"{error.strerror}; set OPWEAVE_CACHE_DIR to a writable folder."
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise NativeBuildError(
            f"There is no home folder for the cache, and other users can write to {folder}; set "
            "OPWEAVE_CACHE_DIR to a folder of your own."
        )
    return folder


def folder(name: str) -> Path:
    """Return the folder *name* of the cache; create it if necessary.

    Raises:
        NativeBuildError: it cannot be created.
    """
    path = cache_dir() / "native" / name
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Provide a temporary folder in *folder*, which must be locked.

    Raises:
        NativeBuildError: it cannot be written.
    """
    with _writing(folder), tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as name:
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
    for left in mine.parent.glob(f"*/{_SCRATCH}*"):
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

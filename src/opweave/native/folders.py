"""The folders of the cache: where they are, who builds in them, and what is left in them."""

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
    """Return where built modules are kept: ``OPWEAVE_CACHE_DIR``, or ``~/.cache/opweave``.

    Raises:
        NativeBuildError: there is no home, and somebody else has the folder that would replace it.
    """
    chosen = os.environ.get("OPWEAVE_CACHE_DIR")
    if chosen:
        return Path(os.path.expanduser(chosen)).absolute()
    try:
        return Path.home() / ".cache" / "opweave"
    except RuntimeError:  # a container's user without a name
        return _own_folder(Path(tempfile.gettempdir()) / f"opweave-{os.getuid()}")


def _own_folder(folder: Path) -> Path:
    """Return *folder*, where all may write: what is in it will be run, so it has to be ours."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise NativeBuildError(
            f"There is no home folder to keep builds in, and no {folder}: {error.strerror}; set "
            "OPWEAVE_CACHE_DIR to a folder that you can write."
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise NativeBuildError(
            f"There is no home folder to keep builds in, and others can write {folder}; set "
            "OPWEAVE_CACHE_DIR to a folder of your own."
        )
    return folder


def folder(name: str) -> Path:
    """Return the folder *name* of the cache, which is made if it is not there.

    Raises:
        NativeBuildError: it cannot be.
    """
    path = cache_dir() / "native" / name
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Provide a folder in *folder*, which is locked, to build in.

    Raises:
        NativeBuildError: something cannot be written there.
    """
    with _writing(folder), tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as name:
        yield Path(name)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in *folder*.

    Raises:
        NativeBuildError: its lock cannot be written.
    """
    with _writing(folder), open(folder / "lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, even by a crash
        _sweep(folder)
        yield


def _sweep(mine: Path) -> None:
    """Remove scratch folders of killed builds, in *mine* and wherever nobody has the lock."""
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
            f"Cannot write the cache folder {folder}: {error.strerror}; set OPWEAVE_CACHE_DIR to "
            "one that you can write."
        ) from error

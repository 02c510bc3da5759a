"""Makes a directory whose files appear only when all of them are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from opweave_engine.errors import InvalidArgumentError


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a directory to write to; it becomes *path* if no error is raised.

    An empty directory *path* is kept and filled, because it may be a mount point, the current
    directory, or the target of a link.

    Args:
        path: missing, or an empty directory.

    Raises:
        InvalidArgumentError: it cannot be written.
    """
    into = path.resolve()
    is_empty = into.is_dir()
    parent = into if is_empty else into.parent
    made = [each for each in (parent, *parent.parents) if not each.exists()]
    partial = parent / f".{into.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        yield partial
        if is_empty:
            for file in sorted(partial.iterdir()):
                file.rename(into / file.name)
        else:
            partial.rename(into)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            for each in made:
                each.rmdir()
        if isinstance(error, OSError) and _is_within(error.filename, (partial, *made)):
            raise InvalidArgumentError(
                f"{str(path)!r} cannot be written: {error.strerror or error}."
            ) from error
        raise
    else:
        shutil.rmtree(partial, ignore_errors=True)


def _is_within(file: object, folders: Iterable[Path]) -> bool:
    """Return whether *file* is in one of *folders*; errors while writing data do not name it."""
    return file is None or any(Path(str(file)).is_relative_to(each) for each in folders)

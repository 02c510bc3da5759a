"""Writes a package with a native op that works, to start from."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from opweave.native.errors import NativeBuildError
from opweave.native.extension import check_name

_TEMPLATES = Path(__file__).parent / "templates"
_PLACES = {"package": "src/{name}", "gitignore": ".gitignore"}


def new(name: str, parent: Path) -> list[Path]:
    """Write the package *name* into a folder of that name in *parent*; return its files.

    Raises:
        NativeBuildError: the name is no good, or the folder exists or cannot be written.
    """
    check_name(name)
    if importlib.util.find_spec(name) is not None and not (parent / name).exists():
        raise NativeBuildError(
            f"A Python package {name!r} is installed already and would be in the way; choose "
            "another name."
        )
    folder = parent / name
    try:
        folder.mkdir()
        return [_write(template, folder, name) for template in sorted(_TEMPLATES.rglob("*.tmpl"))]
    except FileExistsError as error:
        raise NativeBuildError(f"{folder} exists already; choose another name.") from error
    except OSError as error:
        raise NativeBuildError(f"Cannot write {folder}: {error.strerror}.") from error


def _write(template: Path, folder: Path, name: str) -> Path:
    first, *rest = template.relative_to(_TEMPLATES).with_suffix("").parts
    path = folder.joinpath(_PLACES.get(first, first).format(name=name), *rest)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = template.read_text(encoding="utf-8").replace("{{name}}", name)
    path.write_text(text, encoding="utf-8")
    return path

"""Creation of packages from templates."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from opweave.ir.errors import OpweaveError
from opweave.native.builder import check_name
from opweave.native.toolchain import NativeBuildError

_TEMPLATES = Path(__file__).parent / "templates"
_TARGET_FOLDERS = {"package": "src/{name}", "gitignore": ".gitignore"}


def new(name: str, parent: Path) -> list[Path]:
    """Create a package with a native op in the new folder *parent*/*name*; return its files.

    Raises:
        NativeBuildError: the name is invalid, or the folder exists or cannot be written.
    """
    check_name(name)
    return write_package(name, parent, [_TEMPLATES], NativeBuildError)


def write_package(
    name: str,
    parent: Path,
    templates: Sequence[Path],
    error: type[OpweaveError],
    values: Mapping[str, str] | None = None,
) -> list[Path]:
    """Create a Python package from folders of templates; return its files.

    A template is a file ``*.tmpl`` with placeholders ``{{name}}``, and ``{{key}}`` for each key of
    *values*. Templates in the folder ``package`` become the Python package.

    Raises:
        error: the name is invalid or that of an installed package, or the folder exists or cannot
            be written.
    """
    if name.endswith("_"):
        raise error(
            f"{name!r} ends in an underscore, which project names must not; choose another."
        )
    folder = parent / name
    filled = {"name": name, **(values or {})}
    try:
        if not folder.exists() and importlib.util.find_spec(name) is not None:
            raise error(
                f"A Python package {name!r} is already installed and would conflict; choose "
                "another name."
            )
        folder.mkdir()
        return [
            _write(template, template.relative_to(root), folder, filled)
            for root in templates
            for template in sorted(root.rglob("*.tmpl"))
        ]
    except FileExistsError as cause:
        raise error(f"{folder} already exists; choose another name.") from cause
    except OSError as cause:
        raise error(f"Cannot write {folder}: {cause.strerror}.") from cause


def _write(template: Path, relative: Path, folder: Path, values: Mapping[str, str]) -> Path:
    first, *rest = relative.with_suffix("").parts
    path = folder.joinpath(_TARGET_FOLDERS.get(first, first).format(name=values["name"]), *rest)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = template.read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"{{{{{key}}}}}", value)
    path.write_text(text, encoding="utf-8")
    return path

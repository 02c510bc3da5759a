"""Distributions that are nothing but their metadata and a module, in a folder on the path."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path
from textwrap import dedent

GENERAL = "opweave.general_plugins"
PLATFORM = "opweave.platform_plugins"

Points = Mapping[str, Mapping[str, str]]


def files(name: str, points: Points, source: str = "", version: str = "1.0") -> dict[str, str]:
    """Return the files of the distribution *name*, with a module called ``<name>_module``.

    Args:
        points: the value of each entry point, by group and name.
        source: of the module.
    """
    folder = f"{name}-{version}.dist-info"
    text = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in named.items())
        for group, named in points.items()
    )
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{folder}/entry_points.txt": text,
        f"{name}_module.py": dedent(source),
    }


def plugin(name: str, source: str, group: str = GENERAL, order: str = "") -> dict[str, str]:
    """Return the files of the distribution *name* with a plugin of that name.

    *order* is what stands in brackets; the plugin's function is called ``register``.
    """
    return files(name, {group: {name: f"{name}_module:register {order}".strip()}}, source)


def install(folder: Path, *distributions: Mapping[str, str]) -> None:
    """Write distributions into *folder*."""
    for distribution in distributions:
        for path, text in distribution.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")


def points_in(folder: Path) -> list[EntryPoint]:
    """Return the entry points of the distributions in *folder*."""
    return [
        point
        for info in sorted(folder.glob("*.dist-info"))
        for point in PathDistribution(info).entry_points
    ]

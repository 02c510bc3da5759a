"""The metadata of opweave where it is not installed, which torch finds its compile backend by."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpu_queue.job import ROOT


def folders(build: Path = ROOT / "build" / "gpu") -> tuple[str, ...]:
    """Return the folders that must be on the path for opweave to look installed.

    None if it is installed; otherwise one in *build*, with its version and its entry points.
    """
    try:
        version("opweave")
    except PackageNotFoundError:
        return (str(_written(build / "metadata")),)
    return ()


def _written(folder: Path) -> Path:
    path = ROOT / "packages" / "opweave" / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    name, release = project["name"], project["version"]
    info = folder / f"{name}-{release}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder

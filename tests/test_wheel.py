"""The contents of the wheel and the versions of the packages, by their configuration."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from opweave.packages import __version__

ROOT = Path(__file__).parents[1] / "packages" / "opweave"


def test_the_wheel_has_opweave_without_the_mindspore_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = [ROOT / name for name in config["tool"]["scikit-build"]["wheel"]["packages"]]
    assert {path.name for path in packages} == {"opweave", "opweave_cli", "opweave_pytest"}
    assert (ROOT / "src/opweave_mindspore/__init__.py").exists()
    sources = [file for path in packages for file in path.rglob("*.py")]
    assert len(sources) > 100
    imports = re.compile(r"^\s*(?:import|from)\s+\w*mindspore", re.MULTILINE)
    assert not [file for file in sources if imports.search(file.read_text(encoding="utf-8"))]


def test_cmake_builds_the_mindspore_extension_on_request_only() -> None:
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    assert re.search(r"option\(OPWEAVE_MINDSPORE .* OFF\)", text)
    assert text.count("csrc/mindspore") == 1
    assert re.search(r"if\(OPWEAVE_MINDSPORE\)\s+add_subdirectory\(csrc/mindspore\)", text)


def test_the_packages_have_one_version_that_the_changelog_begins_with() -> None:
    for path in ROOT.parent.glob("*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        pins = [each for each in project["dependencies"] if each.startswith("opweave")]
        expected = [] if project["name"] == "opweave" else [f"opweave=={__version__}"]
        assert (project["version"], pins) == (__version__, expected)
    changes = (ROOT.parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    latest = re.search(r"^## (\S+) \(\d{4}-\d{2}-\d{2}\)$", changes, re.MULTILINE)
    assert latest is not None
    assert latest[1] == __version__

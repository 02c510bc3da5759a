"""The contents of the wheel, by its configuration."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

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

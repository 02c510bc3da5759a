"""Every Python block of the README and the documentation runs, and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

import opweave

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```python" in page.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run_and_print_what_they_say(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    namespace: dict[str, object] = {"__name__": "page"}
    printed = ""
    try:
        for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language == "text" and printed:
                assert printed.split() == block.split()
            elif language == "python":
                output = StringIO()
                with redirect_stdout(output):
                    exec(compile(block, str(page), "exec"), namespace)
                printed = output.getvalue()
    finally:
        torch.set_grad_enabled(True)


def test_the_pages_with_code_are_found() -> None:
    assert {"README.md", "tutorial.md"} <= {page.name for page in PAGES}


def modules() -> list[str]:
    found = pkgutil.walk_packages(opweave.__path__, "opweave.")
    return [module.name for module in found if not module.name.endswith("_C_ops")]


@pytest.mark.parametrize("name", modules())
def test_doctests(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0

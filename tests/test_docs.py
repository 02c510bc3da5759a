"""Every Python block of the README and the documentation runs, and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import opweave
from warm_python import warm_python

MARK = "--- end of block ---"
ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```python" in page.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run_and_print_what_they_say(page: Path) -> None:
    # In a process of its own: pages declare ops and change torch's state.
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    program = [f"exec({block!r}); print({MARK!r})" for kind, block in blocks if kind == "python"]
    done = warm_python().run("-W", "error", "-c", "\n".join(program), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    printed = iter(done.stdout.split(MARK))
    output = ""
    for kind, block in blocks:
        if kind == "python":
            output = next(printed)
        elif output.strip():
            assert output.split() == block.split()


def test_the_pages_with_code_are_found() -> None:
    assert {"README.md", "tutorial.md"} <= {page.name for page in PAGES}


FILE = re.compile(
    r"`((?:src/opweave|csrc/(?:core|kernels|module)|benchmarks)/[\w./-]+\.(?:py|cpp|h|md|svg|json))`"
)


def test_files_that_pages_name_exist() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = {(page.name, file) for page in pages for file in FILE.findall(page.read_text("utf-8"))}
    assert len(named) > 20
    assert [(page, file) for page, file in named if not (ROOT / file).exists()] == []


def modules() -> list[str]:
    found = (module.name for module in pkgutil.walk_packages(opweave.__path__, "opweave."))
    # Triton's language has no examples, and Triton is not in this environment.
    return [name for name in found if not name.endswith("_C_ops") and ".triton.jit." not in name]


@pytest.mark.parametrize("name", modules())
def test_doctests(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0

"""Every Python block of the README and the documentation runs, and prints what it says."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import opweave
import opweave_engine
from opweave.packages import is_installed
from opweave_vllm import migrate, vllm_api
from support.warm_python import warm_python

MARK = "--- end of block ---"
ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```python" in page.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run_and_print_what_they_say(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if "import triton" in text and not is_installed("triton"):
        pytest.skip("make test-triton runs this page")
    # In a process of its own: pages declare ops and change torch's state. And from files: Triton
    # reads the source of kernels.
    blocks = BLOCK.findall(text)
    program = []
    for number, (kind, block) in enumerate(blocks):
        if kind == "python":
            file = tmp_path / f"block_{number}.py"
            file.write_text(block, encoding="utf-8")
            code = f"compile({block!r}, {str(file)!r}, 'exec')"
            program.append(f"exec({code}); print({MARK!r})")
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


def test_the_example_runs_the_readers_kernel() -> None:
    done = warm_python().run("-W", "error", ROOT / "examples" / "hello_kernel.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["→", "hello"]


FILE = re.compile(r"`((?:packages|benchmarks)/[\w./-]+\.(?:py|cpp|h|md|svg|json))`")


def test_files_that_pages_name_exist() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = {(page.name, file) for page in pages for file in FILE.findall(page.read_text("utf-8"))}
    assert len(named) > 15
    assert [(page, file) for page, file in named if not (ROOT / file).exists()] == []


def test_pages_say_where_engine_config_is_from() -> None:
    named = re.compile(r"(?<!opweave\.config\.)EngineConfig\(")
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        imports = re.search(r"from opweave\.config import .*EngineConfig", text)
        assert imports or not named.search(text), page


def modules() -> list[str]:
    names = [
        module.name
        for package in (opweave, opweave_engine, vllm_api, migrate)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    # Triton's language has no examples, and Triton is not in this environment.
    return [name for name in names if not name.endswith("_C_ops") and ".triton.jit." not in name]


@pytest.mark.parametrize("name", modules())
def test_doctests(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


# Ranks sample the same tokens in any dtype, because all-reduce gives them the same bits.
_CLAIM = re.compile(
    r"(?<!sample the )(?<!samples the )\b(?:same|equal) (?:\w+ )?tokens\b"
    r"|\btokens (?:\w+ )?(?:are the same|equal|are equal)\b"
    r"|\btokens[^.]* are equal\b"
)
_CONDITION = re.compile("float32|batch.invarian", re.IGNORECASE)


def test_claims_of_equal_tokens_name_the_dtype_or_the_mode() -> None:
    """In 16 bits, the order of additions decides ties, so that tokens differ."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").rglob("*.md")]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    for source in (ROOT / "src").rglob("*.py"):
        text = source.read_text(encoding="utf-8")
        if not _CLAIM.search(" ".join(text.split())):
            continue
        nodes = ast.walk(ast.parse(text))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = (ast.get_docstring(node) for node in nodes if isinstance(node, kinds))
        texts[source] = "\n\n".join(filter(None, docstrings))
    num_claims = 0
    for path, text in texts.items():
        for paragraph in re.split(r"\n\s*\n|\n\|", text):
            for sentence in re.split(r"(?<=[.:])\s", " ".join(paragraph.split())):
                if _CLAIM.search(sentence):
                    num_claims += 1
                    assert _CONDITION.search(sentence), f"{path.name}: {sentence}"
    assert num_claims >= 5

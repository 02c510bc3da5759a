"""The reference has an entry for every public name, and shows no markup of other systems."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import griffe
import pytest

from opweave import ir
from opweave.packages import PROJECT

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {page: page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}
ENTRY = re.compile(r"^::: (opweave(?:_engine)?[\w.]+)", re.MULTILINE)
ENTRIES = {name for text in PAGES.values() for name in ENTRY.findall(text)}
PACKAGES = (
    *("opweave.compile", "opweave.config", "opweave.conformance", "opweave.ir", "opweave.layers"),
    *("opweave.native", "opweave.platforms", "opweave.plugins", "opweave.tuning"),
    *("opweave_engine", "opweave_engine.models", "opweave_engine.server"),
)


def public(package: str) -> dict[str, Any]:
    found = importlib.import_module(package)
    return {name: getattr(found, name) for name in found.__all__}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_entry(package: str) -> None:
    for name, value in public(package).items():
        if value is ir.ops:
            continue  # has a page
        # An object of two packages has one entry; the entry of a module covers its contents.
        owners = [other for other in PACKAGES if public(other).get(name) is value]
        names = {f"{owner}.{name}" for owner in owners}
        assert ENTRIES & {*names, getattr(value, "__module__", None)}, name


def test_every_page_is_listed() -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES:
        assert f"- {page.relative_to(DOCS)}\n" in listed


def test_the_page_of_the_ops_has_them_all_and_nothing_else() -> None:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.on_page_markdown(PAGES[DOCS / "reference" / "ops.md"])
    entries = re.findall(r"^::: (\S+)\n    options: \{members: \[(.+)\]\}$", page, re.MULTILINE)
    shown = [name for _, names in entries for name in names.split(", ")]
    assert sorted(shown) == sorted(ir.ops.__all__)
    for file, names in entries:
        assert file.startswith("opweave.ir.ops.")
        for name in names.split(", "):
            assert getattr(ir.ops, name).native is vars(importlib.import_module(file))[name].native


def test_no_docstring_keeps_a_role_or_a_literal_block() -> None:
    extensions = griffe.load_extensions(str(DOCS / "docstrings.py"))
    texts = {}

    def collect(found: griffe.Object | griffe.Alias) -> None:
        if not found.is_alias:
            if found.docstring is not None:
                texts[found.path] = found.docstring.value
            for member in found.members.values():
                collect(member)

    paths = [str(path) for path in ROOT.glob("packages/*/src")]
    for name in PROJECT:
        collect(griffe.load(name, search_paths=paths, extensions=extensions))
    assert len(texts) > 1000
    for path, text in texts.items():
        assert not re.search(r":\w+:`|::$", text, re.MULTILINE), path
    link = (
        '<autoref identifier="opweave.ir.register_op" optional>`opweave.ir.register_op`</autoref>'
    )
    assert link in texts["opweave.ir.registry.IrOp"]
    assert "Example:\n\n```python\n" in texts["opweave.layers.custom_op.CustomOp"]

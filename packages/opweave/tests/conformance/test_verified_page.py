"""The page of verified implementations says what the certificate says, and no more."""

from __future__ import annotations

import importlib.util
import json
import lzma
from typing import Any

import pytest

from opweave.conformance import certificate, subjects, verify
from support import ROOT


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generated", ROOT / "docs" / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def issued() -> dict[str, Any]:
    found = subjects(["relu2"])
    return certificate([verify(subject, ["values", "empty"]) for subject in found], seed=0)


def row(page: str, op: str) -> list[str]:
    [line] = [line for line in page.splitlines() if line.startswith(f"| `{op}` |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_every_registered_implementation_has_a_cell(hooks: Any, issued: dict[str, Any]) -> None:
    page = hooks.verified(issued)
    native, kernel = row(page, "relu2")[0], [cell for cell in row(page, "relu2")[1:] if cell]
    assert int(native) > 0
    assert int(kernel[0].replace(",", "")) > 50
    assert row(page, "rms_norm")[0] == "not yet verified"
    for subject in subjects():
        assert row(page, subject.op.name)[0]
    assert page.startswith(f"{len(issued['results'])} passed. opweave ")


@pytest.mark.parametrize("digest", ["source", "definition"])
def test_other_sources_are_not_verified(hooks: Any, issued: dict[str, Any], digest: str) -> None:
    issued["results"][1][digest] = "another"
    cells = row(hooks.verified(issued), "relu2")
    assert cells.count("passed, changed since") == 1


def test_what_failed_is_said(hooks: Any, issued: dict[str, Any]) -> None:
    issued["results"][1]["status"] = "failed"
    assert "**failed**" in row(hooks.verified(issued), "relu2")


def test_the_certificate_of_the_page_names_no_folder(hooks: Any) -> None:
    text = lzma.decompress(hooks._CERTIFICATE.read_bytes()).decode()
    assert json.loads(text)["results"]
    assert str(ROOT) not in text
    assert "/home/" not in text
    assert "## " not in hooks.on_page_markdown("<!-- certificate -->")

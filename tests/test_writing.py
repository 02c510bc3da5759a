"""The writing check finds what it is for, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "runs"))
import writing


@pytest.mark.parametrize(
    "prose",
    [
        "This body is no JSON.",
        "They are\nno HTTP.",
        "It runs whatever the batch is.",
        "The kernel beside it.",
        "The graph is compiled anew.",
        "What is not listed goes to Inductor.",
        "First. What happens is this.",
        "- What a rank does",
        "Retries: there are none.",
        "The reason is told by the log.",
        "a linear map",
    ],
)
def test_banned_phrases_are_found(prose: str) -> None:
    assert writing.phrase_findings(prose)


@pytest.mark.parametrize(
    "prose",
    [
        "There is no kernel for it.",
        "It is no longer needed.",
        "It is no slower than eager mode, and no more than one is open.",
        "Besides, the value is None.",
        "What does it cost? Nothing.",
        "Write `what is not there` in code.",
    ],
)
def test_plain_prose_passes(prose: str) -> None:
    assert not writing.phrase_findings(writing.prose_of_page(prose))


def test_findings_name_the_line_and_skip_code_blocks() -> None:
    page = "# Title\n\n```python\n# beside\n```\n\nIt is\nanew.\n"
    assert writing.page_findings(page, "docs/page.md") == ["8: 'anew': use 'again'"]


def test_comments_strings_and_docstrings_are_read() -> None:
    source = '"""Anew."""\n# beside\nprint(f"{x} is no number")\n'
    prose = writing._prose_of_python(source)
    lines = [finding.partition(":")[0] for finding in writing.source_findings(prose)]
    assert lines == ["1", "2", "3"]
    cpp = 'int a;  // anew\nfail("is no tensor");\n// it is\n// no tensor\n'
    found = writing.source_findings(writing._prose_of_cpp(cpp))
    assert [finding.partition(":")[0] for finding in found] == ["1", "2", "3"]


def test_long_sentences_and_long_pages_are_found() -> None:
    assert "a sentence of 41 words" in writing.page_findings("word " * 41 + ".", "docs/page.md")[0]
    assert not writing.page_findings("word " * 40 + ".", "docs/page.md")
    page = "One two three four five six seven eight nine ten.\n\n" * 91
    assert "split the page" in writing.page_findings(page, "docs/page.md")[0]


def test_repeated_class_names_are_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f"class Same: ...\nclass Only{name}: ...\n")
    [finding, *_] = writing.class_findings(tmp_path)
    assert finding == "class Same is defined 2 times: a.py:1, b.py:1"


@pytest.mark.parametrize(
    ("subject", "is_good"),
    [
        ("engine: stream deltas end to end", True),
        ("compile, ir: share one rule", True),
        ("engine: " + "x" * 64, True),
        ("engine: " + "x" * 65, False),
        ("Stream deltas", False),
        ("fixup! engine: stream deltas", True),
    ],
)
def test_commit_subjects(subject: str, is_good: bool) -> None:
    assert (not writing.subject_findings(f"{subject}\n\nWhy.\n")) is is_good

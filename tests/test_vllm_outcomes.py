"""The program that runs vLLM's own tests: its table, and its list of known differences."""

from __future__ import annotations

from pathlib import Path

from runs.vllm_tests.outcomes import FAILED, PASSED, SKIPPED, compare, known_differences, table

OUTCOMES = {
    "tests/a.py::test_one": PASSED,
    "tests/a.py::test_two[x-1]": FAILED,
    "tests/b.py::test_three": SKIPPED,
}


def test_known_differences_have_reasons(tmp_path: Path) -> None:
    file = tmp_path / "differences.txt"
    file.write_text("# it is so\ntests/a.py::test_two[x-1]\n\n# other\ntests/b.py::test_three\n")
    assert known_differences(file) == {
        "tests/a.py::test_two[x-1]": "it is so",
        "tests/b.py::test_three": "other",
    }
    committed = known_differences(Path(__file__).parent / "runs/vllm_tests/differences.txt")
    assert committed
    assert all(committed.values())


def test_a_table_counts_by_file() -> None:
    lines = [line.split() for line in table(OUTCOMES)]
    assert lines == [
        ["file", "passed", "failed", "skipped"],
        ["tests/a.py", "1", "1", "0"],
        ["tests/b.py", "0", "0", "1"],
        ["total", "1", "1", "1"],
    ]


def test_every_deviation_from_the_list_is_a_problem() -> None:
    known = {"tests/a.py::test_two[x-1]": "it is so"}
    assert compare(OUTCOMES, known, complete=True) == []
    assert compare(OUTCOMES, {}, complete=True) == ["failed: tests/a.py::test_two[x-1]"]
    passes = {**known, "tests/a.py::test_one": "it is so"}
    [problem] = compare(OUTCOMES, passes, complete=True)
    assert problem == "passes, but is listed as a difference: tests/a.py::test_one"
    for gone in ("tests/b.py::test_three", "tests/b.py::test_four"):
        assert compare(OUTCOMES, {**known, gone: "x"}, complete=False) == []
        [problem] = compare(OUTCOMES, {**known, gone: "x"}, complete=True)
        assert problem == f"is listed as a difference, but did not run: {gone}"

"""``opweave quantize``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import test_cli
from test_cli import CHECKPOINT, Run, assert_one_line_error

run = test_cli.run  # the fixture
TEXT = Path(CHECKPOINT) / "heldout.txt"


def test_quantize_and_generate(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT.read_text(encoding="utf-8")[:6000], encoding="utf-8")
    into = tmp_path / "int4"
    options = ("--w4", "--group", "32", "-o", into, "--perplexity", text)
    done = run("quantize", CHECKPOINT, *options, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["quantized"]) == 42
    assert found["ignored"] == ["lm_head"]
    assert found["bytes_after"] < 0.75 * found["bytes_before"]
    assert 10 < found["perplexity_before"] < found["perplexity_after"]
    assert found["perplexity_after"] < 1.05 * found["perplexity_before"]
    answer = run("generate", into, "--prompt", "Return a list of", "--max-tokens", "4")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("Return a list of")


def test_the_summary(run: Run, tmp_path: Path) -> None:
    done = run("quantize", CHECKPOINT, "--w4", "-o", tmp_path / "int4")
    assert done.returncode == 0, done.stderr
    assert "42 weights in int4, groups of 64" in done.stdout
    assert "perplexity" not in done.stdout


def test_refusals(run: Run, tmp_path: Path) -> None:
    into = tmp_path / "int4"
    bare = tmp_path / "bare"
    shutil.copytree(CHECKPOINT, bare)
    (bare / "tokenizer.json").unlink()
    for arguments, message in (
        ((CHECKPOINT, "-o", into), "--w4 writes int4 weights"),
        ((CHECKPOINT, "--w4", "--group", "48", "-o", into), "group=48 is not supported"),
        ((CHECKPOINT, "--w4", "-o", tmp_path.parent), "exists already"),
        ((tmp_path / "none", "--w4", "-o", into), "is not a directory"),
        ((CHECKPOINT, "--w4", "-o", into, "--perplexity", tmp_path), "cannot be read"),
        ((bare, "--w4", "-o", into, "--perplexity", TEXT), "bare has no tokenizer.json"),
        ((CHECKPOINT, "--w4", "-o", TEXT / "int4"), "cannot be written: Not a directory"),
    ):
        assert_one_line_error(run("quantize", *arguments), message)
    assert not into.exists()

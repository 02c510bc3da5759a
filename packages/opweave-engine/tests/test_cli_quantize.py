"""``opweave quantize``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import test_cli
from engine.gguf_files import write
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


# ``opweave generate`` with GGUF files: what it writes, and one line for what it cannot read


PROMPT = "Return a list of"


def add_tokenizer(writer: GGUFWriter) -> None:
    """Add the tokenizer of the small checkpoint: BPE of bytes, split as GPT-2 does."""
    tokenizer = json.loads((Path(CHECKPOINT) / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([text for text, _ in vocabulary])
    writer.add_token_types([3 if token in special else 1 for _, token in vocabulary])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    config = json.loads((Path(CHECKPOINT) / "config.json").read_text(encoding="utf-8"))
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A file of the small trained checkpoint in Q8_0, and transformers' model of its values."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    path = tmp_path_factory.mktemp("gguf") / "tiny-pydoc.gguf"
    return write(path, model, lambda _: Kind.Q8_0, add_tokenizer), model


def test_generate(run: Run, built: tuple[Path, Any]) -> None:
    path, model = built
    options = ("--prompt", PROMPT, "--max-tokens", "8", "--dtype", "float32", "--json")
    done = run("generate", path, *options)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)["outputs"][0]
    ids = Tokenizer.from_file(str(Path(CHECKPOINT) / "tokenizer.json")).encode(PROMPT).ids
    assert output["prompt_token_ids"] == ids
    found = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    assert output["token_ids"] == found[0, len(ids) :].tolist()

"""``opweave generate`` with GGUF files: what it writes, and one line for what it cannot read."""

from __future__ import annotations

import json
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
from test_cli import CHECKPOINT, Run

run = test_cli.run  # the fixture
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

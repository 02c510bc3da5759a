"""Embeddings of the published all-MiniLM-L6-v2 are those of transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from models.tiny_checkpoints import edit_config
from opweave_engine import AsyncEmbedder, Embedder
from server.conftest import Running, running
from weights import trained_models
from weights.trained_models import minilm

PAIR = ["A man is eating food.", "A man is eating a piece of bread."]
TEXTS = [*PAIR, "", "Größe, naïve façade — 東京 🙂", "one two three " * 60, "a"]


@pytest.fixture(scope="module")
def path() -> Path:
    return minilm()


@pytest.fixture(scope="module")
def embedder(path: Path) -> Embedder:
    return Embedder(path)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Running]:
    engine: Any = AsyncEmbedder(path)
    with running(engine, template=None) as served:
        yield served
    engine.shutdown()


@pytest.fixture(scope="module")
def oracle(path: Path) -> dict[str, tuple[list[int], Tensor]]:
    """Return the tokens and the normalized mean of the hidden states of each text."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    found = {}
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        with torch.inference_mode():
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        found[text] = ids, mean / mean.norm()
    return found


def test_the_checkpoint_asks_for_padding_and_truncation(path: Path) -> None:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert backend.padding["length"] == 128
    assert backend.truncation["max_length"] == 128


def test_as_mean_pooling_with_transformers(
    embedder: Embedder, oracle: dict[str, tuple[list[int], Tensor]]
) -> None:
    for text, output in zip(TEXTS, embedder.embed(TEXTS), strict=True):
        ids, vector = oracle[text]
        for one in (output, *embedder.embed(text)):
            assert one.prompt_token_ids == ids
            torch.testing.assert_close(torch.tensor(one.embedding), vector, rtol=0, atol=1e-5)


def test_the_length_as_newer_libraries_write_it(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "model"))
    (copy / "sentence_bert_config.json").unlink()
    edit_config(copy, "tokenizer_config.json", model_max_length=64)
    embedder = Embedder(copy)
    assert embedder.max_model_len == 64
    text = "one two three " * 60
    tokenizer, model = AutoTokenizer.from_pretrained(copy), AutoModel.from_pretrained(copy).eval()
    ids = tokenizer(text, truncation=True)["input_ids"]
    assert len(ids) == 64
    with torch.inference_mode():
        mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
    (found,) = embedder.embed(text, truncate_prompt_tokens=-1)
    assert found.prompt_token_ids == ids
    torch.testing.assert_close(torch.tensor(found.embedding), mean / mean.norm(), rtol=0, atol=1e-5)


def test_similarity_of_two_sentences_over_http(server: Running) -> None:
    answer = server.openai().embeddings.create(model="all-MiniLM-L6-v2", input=PAIR)
    first, second = (torch.tensor(item.embedding) for item in answer.data)
    assert (first @ second).item() == pytest.approx(0.755, abs=5e-4)
    one = server.openai().embeddings.create(model="all-MiniLM-L6-v2", input=PAIR[0])
    assert one.usage.prompt_tokens == 8
    assert one.usage.total_tokens == 8


def test_tokens_over_http(server: Running) -> None:
    found = server.post("/tokenize", {"prompt": PAIR[0]}).json()
    assert found["count"] == len(found["tokens"]) == 8


def test_weights_that_are_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trained_models, "PACKAGES", tmp_path / "weights")
    monkeypatch.setattr(trained_models, "CHECKPOINTS", tmp_path / "checkpoints")
    for model in (minilm, trained_models.smollm2):
        with pytest.raises(FileNotFoundError, match=r"run `make build/weights/installed.stamp`"):
            model()
    assert not list((tmp_path / "checkpoints").iterdir())

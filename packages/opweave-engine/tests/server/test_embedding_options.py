"""Options of embeddings: long texts, length, normalization, conversations; and bad numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from models.tiny_checkpoints import edit_config, write_checkpoint
from opweave_engine import (
    ChatTemplate,
    Embedder,
    PoolingParams,
    PromptError,
    SamplingParamsError,
    open_engine,
)
from server.conftest import Running, running

PATH = "/v1/embeddings"
TEXT = "the quick dog and the lazy cat"
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}dog{% endif %}",
    "a test",
    {},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    write_checkpoint(path, "bert")
    edit_config(path, matryoshka_dimensions=[8, 16])
    return path


@pytest.fixture(scope="module")
def embedder(checkpoint: Path) -> Embedder:
    return Embedder(checkpoint)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Running]:
    engine: Any = open_engine(checkpoint)
    with running(engine, template=TEMPLATE) as shared:
        yield shared
    engine.shutdown()


def mean(checkpoint: Path, ids: list[int]) -> torch.Tensor:
    """The vector by transformers."""
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        states: torch.Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return states.mean(0)


def ask(server: Running, **body: Any) -> list[Any]:
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


@pytest.mark.parametrize("normalize", [None, False, True])
@pytest.mark.parametrize("dimensions", [None, 8])
def test_the_length_of_a_vector_and_its_numbers(
    checkpoint: Path, server: Running, embedder: Embedder, normalize: Any, dimensions: Any
) -> None:
    ids = [5, 6, 7, 8]
    expected = mean(checkpoint, ids)[:dimensions]
    if normalize:
        expected = expected / expected.norm()
    params = PoolingParams(dimensions, normalize)
    (output,) = embedder.embed(ids, params)
    assert output.embedding == pytest.approx(expected.tolist(), abs=1e-5)
    body = {"dimensions": dimensions, "normalize": normalize, "use_activation": normalize}
    assert ask(server, input=ids, **body)[0] == pytest.approx(expected.tolist(), abs=1e-5)


def test_other_endpoints_of_an_encoder(server: Running) -> None:
    assert server.get("/health").status_code == 200
    assert "opweave_num_requests_running" in server.get("/metrics").text
    assert any(each["ran"] for each in server.get("/v1/ops").json()["data"])
    refused = server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2})
    assert refused.status_code == 400
    assert "does not generate text" in refused.text


def test_texts_of_one_request_with_different_options(embedder: Embedder) -> None:
    texts = [[5, 6], [7, 8, 9]]
    params = [PoolingParams(8, True), PoolingParams()]
    alone = [embedder.embed(t, p)[0].embedding for t, p in zip(texts, params, strict=True)]
    assert embedder.vectors(texts, params) == [pytest.approx(each, abs=1e-6) for each in alone]


@pytest.mark.parametrize("dimensions", [9, 17, 4096, 0, -1])
def test_lengths_that_the_model_was_not_trained_for(
    server: Running, embedder: Embedder, dimensions: int
) -> None:
    with pytest.raises(SamplingParamsError, match="dimensions"):
        embedder.embed([5], PoolingParams(dimensions))
    error = server.post(PATH, {"input": "x", "dimensions": dimensions}).json()["error"]
    assert error["param"] == "dimensions"
    assert str(dimensions) in error["message"]


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_long_text_is_cut(server: Running, embedder: Embedder, side: Any) -> None:
    ids = embedder.tokenizer.encode(TEXT)
    assert len(ids) > 4
    kept = ids[0:1] + ids[-2:] if side == "left" else ids[:3]
    found = ask(server, input=TEXT, truncate_prompt_tokens=3, truncation_side=side)
    (expected,) = embedder.embed(kept)
    assert found[0] == pytest.approx(expected.embedding, abs=1e-5)
    if side != "left":
        (output,) = embedder.embed(TEXT, truncate_prompt_tokens=3)
        assert output.prompt_token_ids == kept


def test_a_text_is_cut_to_what_the_model_takes(server: Running, embedder: Embedder) -> None:
    text, room = "dog " * 900, embedder.max_model_len
    with pytest.raises(PromptError):
        embedder.embed(text)
    (output,) = embedder.embed(text, truncate_prompt_tokens=-1)
    assert len(output.prompt_token_ids) == room
    assert server.post(PATH, {"input": text}).status_code == 400
    answer = server.post(PATH, {"input": [text, "x"], "truncate_prompt_tokens": -1})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] > room
    error = server.post(PATH, {"input": text, "truncate_prompt_tokens": 0}).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"


def test_special_tokens(server: Running, embedder: Embedder) -> None:
    bare = embedder.tokenizer.encode(TEXT, add_special_tokens=False)
    (expected,) = embedder.embed(bare)
    (output,) = embedder.embed(TEXT, add_special_tokens=False)
    assert output.embedding == expected.embedding
    found = ask(server, input=TEXT, add_special_tokens=False)
    assert found[0] == pytest.approx(expected.embedding, abs=1e-6)


@pytest.mark.parametrize("header", [False, True])
def test_a_conversation(server: Running, embedder: Embedder, header: bool) -> None:
    messages = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "cat"}]
    options = {"add_generation_prompt": True} if header else {}
    text = "the quick cat " + ("dog" if header else "")
    (expected,) = embedder.embed(text, add_special_tokens=False)
    found = ask(server, messages=messages, **options)
    assert found == [pytest.approx(expected.embedding, abs=1e-6)]


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
def test_a_text_and_a_conversation_are_too_much(server: Running, path: str) -> None:
    name = "input" if path == PATH else "prompt"
    body = {name: "x", "messages": [{"role": "user", "content": "x"}]}
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert f"Send {name} or messages" in answer.json()["error"]["message"]


def test_options_that_contradict_each_other(server: Running) -> None:
    answer = server.post(PATH, {"input": "x", "normalize": True, "use_activation": False})
    assert answer.json()["error"]["param"] == "normalize"


def test_numbers_that_are_nan_are_an_error(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = server.engine._embedder.vectors  # type: ignore[attr-defined]

    def spoiled(texts: Any, params: Any) -> list[list[float]]:
        return [[math.nan, *vector[1:]] for vector in vectors(texts, params)]

    monkeypatch.setattr(server.engine._embedder, "vectors", spoiled)  # type: ignore[attr-defined]
    answer = server.post(PATH, {"input": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "non_finite_embedding"


def test_tokens_that_only_the_model_has_are_no_text(
    server: Running, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond = max(embedder.tokenizer._backend.get_vocab().values()) + 1
    size = server.engine.vocab_size
    assert beyond == size == embedder.vocab_size
    monkeypatch.setattr(server.engine, "vocab_size", size + 5)
    answer = server.post("/detokenize", {"tokens": [5, beyond, 6]})
    assert answer.json()["prompt"] == embedder.tokenizer.decode([5, 6])
    assert server.post("/detokenize", {"tokens": [size + 5]}).status_code == 400

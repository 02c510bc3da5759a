"""Scores of pairs of texts, and documents sorted by them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from models.tiny_checkpoints import write_checkpoint, write_cross_encoder
from opweave_engine import open_engine
from server.conftest import Running, running

QUERY = "the quick fox"
TEXTS = ["the lazy dog", "naïve façade, 東京", "", "and then it sleeps over the brown fox"]
LONG = "dog " * 100


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scores")
    write_cross_encoder(path, "bert")
    return path


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Running]:
    engine: Any = open_engine(checkpoint, model_name="scorer")
    with running(engine, template=None) as shared:
        yield shared
    engine.shutdown()


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[float]:
    """The scores of QUERY with TEXTS by transformers."""
    return scored(checkpoint, [(QUERY, text) for text in TEXTS])


def scored(path: Path, pairs: list[tuple[str, str]]) -> list[float]:
    model: Any = write_cross_encoder(path, "bert")
    tokenizer = AutoTokenizer.from_pretrained(path)
    with torch.inference_mode():
        rows = [model(**tokenizer([pair], return_tensors="pt")).logits.sigmoid() for pair in pairs]
    scores: list[float] = torch.cat(rows)[:, 0].tolist()
    return scores


def ask(server: Running, path: str, **body: Any) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(server: Running, path: str, **body: Any) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def num_tokens(server: Running, texts: list[str]) -> int:
    encode = server.state.engine.tokenizer.encode_pair
    return sum(len(encode(QUERY, text)[0]) for text in texts)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_documents_are_sorted(path: str, server: Running, expected: list[float]) -> None:
    order = sorted(range(len(TEXTS)), key=lambda index: -expected[index])
    assert order != sorted(order)
    actual = ask(server, path, query=QUERY, documents=[TEXTS[0], *({"text": t} for t in TEXTS[1:])])
    assert actual["id"].startswith("rerank-")
    assert actual["model"] == "scorer"
    assert actual["results"] == [
        {
            "index": index,
            "document": {"text": TEXTS[index]},
            "relevance_score": pytest.approx(expected[index], abs=2e-5),
        }
        for index in order
    ]
    tokens = num_tokens(server, TEXTS)
    assert actual["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize(("top_n", "count"), [(1, 1), (3, 3), (9, 4), (0, 4), (None, 4)])
def test_the_first_results(top_n: Any, count: int, server: Running, expected: list[float]) -> None:
    body = {"query": QUERY, "documents": TEXTS, "top_n": top_n, "return_documents": False}
    results = ask(server, "/v1/rerank", **body)["results"]
    assert [result["relevance_score"] for result in results] == [
        pytest.approx(score, abs=2e-5) for score in sorted(expected, reverse=True)[:count]
    ]
    assert all(result.keys() == {"index", "relevance_score"} for result in results)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores(path: str, server: Running, checkpoint: Path, expected: list[float]) -> None:
    actual = ask(server, path, text_1=QUERY, text_2=TEXTS)
    assert actual["id"].startswith("score-")
    assert (actual["object"], actual["model"]) == ("list", "scorer")
    assert actual["data"] == [
        {"index": index, "object": "score", "score": pytest.approx(score, abs=2e-5)}
        for index, score in enumerate(expected)
    ]
    assert actual["usage"]["prompt_tokens"] == num_tokens(server, TEXTS)
    (one,) = ask(server, path, text_1=QUERY, text_2=TEXTS[1])["data"]
    assert one["score"] == pytest.approx(expected[1], abs=2e-5)
    both = ask(server, path, text_1=[QUERY, "a dog"], text_2=TEXTS[:2])["data"]
    (other,) = scored(checkpoint, [("a dog", TEXTS[1])])
    assert [item["score"] for item in both] == [
        pytest.approx(score, abs=2e-5) for score in (expected[0], other)
    ]


def test_long_pairs(server: Running) -> None:
    for path, body, param in (
        ("/v1/rerank", {"query": QUERY, "documents": ["x", LONG]}, "documents"),
        ("/v1/score", {"text_1": QUERY, "text_2": LONG}, "text_2"),
        ("/v1/score", {"text_1": LONG * 1000, "text_2": QUERY}, "text_2"),
    ):
        error = refusal(server, path, **body)
        assert error["param"] == param
        assert "96 tokens" in error["message"]
        ask(server, path, **body, truncate_prompt_tokens=-1)
        error = refusal(server, path, **body, truncate_prompt_tokens=0)
        assert error["param"] == "truncate_prompt_tokens"
    body = {"text_1": QUERY, "text_2": LONG}
    usage = ask(server, "/v1/score", **body, truncate_prompt_tokens=20)["usage"]
    assert usage["prompt_tokens"] == 20


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": QUERY, "documents": []}, "documents"),
        ("/v1/rerank", {"query": QUERY, "documents": [5]}, "documents"),
        ("/v1/rerank", {"query": QUERY, "documents": [{"title": "x"}]}, "documents"),
        ("/v1/rerank", {"query": [QUERY], "documents": ["x"]}, "query"),
        ("/v1/rerank", {"documents": ["x"]}, "query"),
        ("/v1/rerank", {"query": QUERY, "documents": ["x"], "top_n": -1}, "top_n"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": [5], "text_2": "c"}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "model": "other"}, "model"),
    ],
)
def test_wrong_requests(path: str, body: Any, param: str, server: Running) -> None:
    answer = server.post(path, body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"].startswith(param)


def test_a_cross_encoder_makes_no_embeddings_and_no_text(server: Running) -> None:
    error = refusal(server, "/v1/embeddings", input="x")
    assert "a cross-encoder (BertForSequenceClassification)" in error["message"]
    error = refusal(server, "/v1/completions", prompt="x", max_tokens=2)
    assert "scores pairs of texts; it does not generate text" in error["message"]


@pytest.mark.parametrize("kind", ["generates text", "an encoder (BertModel)"])
def test_models_that_cannot_say_what_they_are(kind: str, tmp_path: Path) -> None:
    if kind == "generates text":
        write_checkpoint(tmp_path, "one_layer")
    else:
        write_cross_encoder(tmp_path, "bert").base_model.save_pretrained(tmp_path)
    engine: Any = open_engine(tmp_path)
    with running(engine, template=None) as server:
        for path, body in (
            ("/v1/rerank", {"query": QUERY, "documents": TEXTS}),
            ("/v1/score", {"text_1": QUERY, "text_2": "x"}),
        ):
            message = refusal(server, path, **body)["message"]
            assert kind in message
            assert "does not score pairs of texts" in message
    engine.shutdown()


def test_scores_that_are_not_finite(tmp_path: Path) -> None:
    write_cross_encoder(tmp_path, "bert")
    weights = load_file(tmp_path / "model.safetensors")
    weights["classifier.bias"].fill_(float("nan"))
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    engine: Any = open_engine(tmp_path)
    with running(engine, template=None) as server:
        answer = server.post("/v1/rerank", {"query": QUERY, "documents": TEXTS})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "non_finite_score"
    engine.shutdown()

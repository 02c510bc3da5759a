"""Scores of pairs are those of transformers' sequence classifiers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from models.tiny_checkpoints import edit_config, write_cross_encoder
from opweave.config import EngineConfig
from opweave_engine import (
    AsyncEmbedder,
    CheckpointError,
    Embedder,
    InvalidArgumentError,
    PoolingParams,
    PromptError,
    SamplingParams,
    SamplingParamsError,
    TokenizerError,
)
from opweave_engine.async_engine import engine_class
from opweave_engine.models import ModelError, UnsupportedModelError

QUERY = "the quick fox"
TEXTS = ["the lazy dog", "", "and then it sleeps over the brown fox", "naïve façade, 東京"]


def logits(path: Path, model: Any, pairs: list[tuple[str, str]], **options: Any) -> torch.Tensor:
    """The logits by transformers' tokenizer and model, one pair at a time."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    with torch.inference_mode():
        # In a list, since transformers takes an empty second text for none.
        rows = [model(**tokenizer([pair], return_tensors="pt", **options)).logits for pair in pairs]
    return torch.cat(rows)[:, 0]


def scores(path: Path, *texts: Any, **options: Any) -> torch.Tensor:
    return torch.tensor([output.score for output in Embedder(path).score(*texts, **options)])


# Qwen3 reads the last token of a pair, which its id of padding shows in a batch.
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("bert", {}),
        ("roberta", {}),
        ("xlm-roberta", {"type_vocab_size": 1}),
        ("distilbert", {}),
        ("modernbert", {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}),
        ("qwen3", {}),
        ("qwen3", {"pad_token_id": None}),
    ],
)
def test_scores_are_those_of_transformers(kind: str, changes: Any, tmp_path: Path) -> None:
    model = write_cross_encoder(tmp_path, kind, **changes)
    assert engine_class(tmp_path) is AsyncEmbedder
    expected = logits(tmp_path, model, [(QUERY, text) for text in TEXTS])
    assert expected.std() > 0.01
    actual = scores(tmp_path, QUERY, TEXTS)
    torch.testing.assert_close(actual, expected.sigmoid(), rtol=0, atol=2e-5)


def test_the_second_text_has_another_token_type(tmp_path: Path) -> None:
    model = write_cross_encoder(tmp_path, "bert")
    pairs = [(QUERY, text) for text in TEXTS]
    typed = logits(tmp_path, model, pairs)
    untyped = logits(tmp_path, model, pairs, return_token_type_ids=False)
    assert (typed.sigmoid() - untyped.sigmoid()).abs().max() > 1e-3
    torch.testing.assert_close(scores(tmp_path, QUERY, TEXTS), typed.sigmoid(), rtol=0, atol=2e-5)
    names = ["input_ids", "attention_mask"]
    edit_config(tmp_path, "tokenizer_config.json", model_input_names=names)
    torch.testing.assert_close(scores(tmp_path, QUERY, TEXTS), untyped.sigmoid(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("path", "function"),
    [
        ("torch.nn.modules.activation.Sigmoid", torch.sigmoid),
        ("torch.nn.modules.linear.Identity", torch.clone),
        (None, torch.sigmoid),
    ],
)
def test_the_activation_function(path: Any, function: Any, old: bool, tmp_path: Path) -> None:
    model = write_cross_encoder(tmp_path, "bert")
    key = "sbert_ce_default_activation_function"
    edit_config(
        tmp_path, **({key: path} if old else {"sentence_transformers": {"activation_fn": path}})
    )
    expected = function(logits(tmp_path, model, [(QUERY, text) for text in TEXTS]))
    torch.testing.assert_close(scores(tmp_path, QUERY, TEXTS), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("value", ["torch.nn.modules.activation.Tanh", "mine.Sigmoid", 5])
def test_other_activation_functions_are_refused(value: Any, tmp_path: Path) -> None:
    write_cross_encoder(tmp_path, "bert")
    edit_config(tmp_path, sentence_transformers={"activation_fn": value})
    with pytest.raises(ModelError, match=rf"'activation_fn': '?{value}"):
        Embedder(tmp_path)
    edit_config(tmp_path, sentence_transformers={}, sbert_ce_default_activation_function=value)
    with pytest.raises(ModelError, match=rf"sbert_ce_default_activation_function': '?{value}"):
        Embedder(tmp_path)


def test_pairs_are_one_to_one_one_to_many_or_many_to_many(tmp_path: Path) -> None:
    model = write_cross_encoder(tmp_path, "bert")
    embedder = Embedder(tmp_path)

    def check(first: Any, second: Any, pairs: list[tuple[str, str]]) -> None:
        actual = torch.tensor([output.score for output in embedder.score(first, second)])
        expected = logits(tmp_path, model, pairs).sigmoid()
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)

    check("a", "b", [("a", "b")])
    check("a", ["b", "dog"], [("a", "b"), ("a", "dog")])
    check(["a"], ("b", "dog"), [("a", "b"), ("a", "dog")])
    check(["a", "fox"], ["b", "dog"], [("a", "b"), ("fox", "dog")])
    for first, second in ((["a", "b"], ["c"]), (["a", "b"], ["c"] * 3), ([], []), ("a", [])):
        with pytest.raises(PromptError, match=f"and {len(second)} second texts"):
            embedder.score(first, second)
    with pytest.raises(PromptError, match=r"A side of the pairs is \[5\]"):
        embedder.score([5], "a")  # type: ignore[list-item]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pair", [("a dog", TEXTS[2]), (TEXTS[2], "a dog"), (TEXTS[2], TEXTS[3])])
def test_long_pairs_are_truncated_as_in_transformers(
    side: Any, pair: tuple[str, str], tmp_path: Path
) -> None:
    write_cross_encoder(tmp_path, "bert")
    tokenizer = Embedder(tmp_path).tokenizer
    theirs = AutoTokenizer.from_pretrained(tmp_path, truncation_side=side)
    for length in range(3, 60):
        expected = theirs(*pair, truncation="longest_first", max_length=length)
        actual = tokenizer.encode_pair(*pair, keep=length, truncation_side=side)
        assert actual == (expected["input_ids"], expected["token_type_ids"]), length
    assert len(tokenizer.encode_pair(*pair, keep=2)[0]) == 2


def test_pairs_that_are_too_long(tmp_path: Path) -> None:
    model = write_cross_encoder(tmp_path, "bert")
    embedder, text = Embedder(tmp_path), "dog " * 100
    with pytest.raises(PromptError, match="the context is 96 tokens"):
        embedder.score(QUERY, text)
    (output,) = embedder.score(QUERY, text, truncate_prompt_tokens=-1)
    assert len(output.prompt_token_ids) == 96
    options = {"truncation": "longest_first", "max_length": 96}
    expected = logits(tmp_path, model, [(QUERY, text)], **options).sigmoid()
    assert output.score == pytest.approx(float(expected), abs=2e-5)
    with pytest.raises(SamplingParamsError, match="truncate_prompt_tokens"):
        embedder.score(QUERY, text, truncate_prompt_tokens=0)


def test_models_that_cannot(tmp_path: Path) -> None:
    write_cross_encoder(tmp_path / "scores", "bert")
    with pytest.raises(InvalidArgumentError, match=r"cross-encoder \(BertForSequenceClassif"):
        Embedder(tmp_path / "scores").embed("x")
    model = write_cross_encoder(tmp_path / "encodes", "bert")
    model.base_model.save_pretrained(tmp_path / "encodes")
    with pytest.raises(
        InvalidArgumentError, match=r"an encoder \(BertModel\), .* does not score pairs"
    ):
        Embedder(tmp_path / "encodes").score("x", "y")
    write_cross_encoder(tmp_path / "classifies", "bert", num_labels=3)
    assert engine_class(tmp_path / "classifies") is AsyncEmbedder
    with pytest.raises(UnsupportedModelError, match=r"Classification with 3 labels is not"):
        Embedder(tmp_path / "classifies")
    with pytest.raises(UnsupportedModelError, match="is not an encoder"):
        Embedder(tmp_path / "scores", config=EngineConfig(model_impl="opweave"))
    (tmp_path / "scores" / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError):
        Embedder(tmp_path / "scores").score("x", "y")


def test_weights_of_the_head_are_required(tmp_path: Path) -> None:
    model = write_cross_encoder(tmp_path, "bert")
    model.base_model.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["BertForSequenceClassification"])
    with pytest.raises(CheckpointError, match=r"missing: .*classifier\.weight"):
        Embedder(tmp_path)


def test_requests_to_an_engine(tmp_path: Path) -> None:
    write_cross_encoder(tmp_path, "bert")
    expected = scores(tmp_path, QUERY, TEXTS)

    async def run() -> None:
        engine = AsyncEmbedder(tmp_path)
        pairs = [engine.tokenizer.encode_pair(QUERY, text) for text in TEXTS]
        wrong = [[*types[:-1], 2] for _, types in pairs] + [pairs[0][1][:-1], [0.5]]
        for types in wrong:
            with pytest.raises(SamplingParamsError, match="integers from 0 to 1, one for each"):
                await engine.embed(pairs[0][0], PoolingParams(token_type_ids=types), request_id="x")
        with pytest.raises(InvalidArgumentError, match="does not make embeddings"):
            await engine.embed("x", request_id="x")
        with pytest.raises(
            InvalidArgumentError, match="scores pairs of texts; it does not generate"
        ):
            await anext(engine.generate("x", SamplingParams(), request_id="x"))
        outputs = await asyncio.gather(
            *(
                engine.embed(ids, PoolingParams(token_type_ids=types), request_id=str(number))
                for number, (ids, types) in enumerate(pairs)
            )
        )
        actual = torch.tensor([output.embedding for output in outputs])
        torch.testing.assert_close(actual, expected[:, None], rtol=0, atol=2e-5)
        engine.shutdown()

    asyncio.run(run())

"""Embeddings of encoders that opweave has no model of its own for, against transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from models.tiny_checkpoints import random_ids, write_tokenizer
from opweave.config import EngineConfig
from opweave_engine import AsyncEmbedder, AsyncEngine, CheckpointError, Embedder, PromptError
from opweave_engine.async_engine import engine_class
from opweave_engine.models import UnsupportedModelError

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
ONE_VECTOR = {"num_key_value_heads": 2, "head_dim": 16}
# Architecture, and what differs from SIZES.
ENCODERS: dict[str, tuple[type, dict[str, Any]]] = {
    "RobertaModel": (transformers.RobertaConfig, {}),
    "XLMRobertaModel": (transformers.XLMRobertaConfig, {}),
    "RobertaForMaskedLM": (transformers.RobertaConfig, {}),
    "MPNetModel": (transformers.MPNetConfig, {}),
    "DistilBertModel": (
        transformers.DistilBertConfig,
        {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
    ),
    "ModernBertModel": (
        transformers.ModernBertConfig,
        {"local_attention": 8, "num_hidden_layers": 3, "cls_token_id": 0, "sep_token_id": 2},
    ),
    "ElectraModel": (transformers.ElectraConfig, {"embedding_size": 64}),
    "Qwen3Model": (transformers.Qwen3Config, ONE_VECTOR),
}
PROMPTS = [random_ids(seed, count) for seed, count in enumerate([1, 7, 23, 2, 96])]


def write(path: Path, name: str) -> Any:
    """Write the checkpoint of an encoder, and return its base model."""
    torch.manual_seed(0)
    config_class, fields = ENCODERS[name]
    config = config_class(**{**SIZES, **fields})
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(path)
    write_tokenizer(path)
    return model.base_model


def vectors(path: Path, **options: Any) -> list[torch.Tensor]:
    embedder = Embedder(path, config=EngineConfig(**options))
    return [torch.tensor(each.embedding) for each in embedder.embed(PROMPTS)]


@torch.inference_mode()
def expected(model: Any, pool: Any) -> list[torch.Tensor]:
    return [pool(model(torch.tensor([prompt])).last_hidden_state[0]) for prompt in PROMPTS]


def assert_near(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def mean(states: torch.Tensor) -> torch.Tensor:
    return states.mean(0)


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, name)
    assert engine_class(tmp_path) is AsyncEmbedder
    assert_near(vectors(tmp_path), expected(model, mean))
    if name == "RobertaModel":
        assert "layer_norm" in str(Embedder(tmp_path)._model.report)  # type: ignore[attr-defined]


def test_ropes_that_depend_on_the_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
    }
    torch.manual_seed(0)
    config = transformers.Olmo2Config(**{**SIZES, "rope_parameters": rope})
    model = transformers.Olmo2Model(config).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    assert_near(vectors(tmp_path), expected(model, mean))


def test_a_language_model_of_sentence_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SIZES, **ONE_VECTOR})
    model: Any = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    assert engine_class(tmp_path) is AsyncEngine
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM is not an encoder"):
        Embedder(tmp_path)
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [{"path": kind, "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    assert engine_class(tmp_path) is AsyncEmbedder

    def last(states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(states[-1], dim=0)

    assert_near(vectors(tmp_path), expected(model.base_model, last))


# Encoders whose positions are those of a table, and the longest text that transformers takes.
LONGEST = {
    **dict.fromkeys(("BertModel", "ElectraModel", "DistilBertModel", "ErnieModel"), 130),
    **dict.fromkeys(("AlbertModel", "Qwen3Model"), 130),
    **dict.fromkeys(("RobertaModel", "RobertaPreLayerNormModel", "XLMRobertaModel"), 128),
    **dict.fromkeys(("CamembertModel", "Data2VecTextModel", "MPNetModel", "IBertModel"), 128),
    **dict.fromkeys(("LukeModel", "LongformerModel", "EsmModel"), 128),
}
QUICK = ("BertModel", "DistilBertModel", "RobertaModel", "LukeModel", "EsmModel", "Qwen3Model")
EXTRA: dict[str, dict[str, Any]] = {
    "LongformerModel": {"attention_window": 8},
    "LukeModel": {"entity_vocab_size": 10, "entity_emb_size": 16},
    "EsmModel": {"position_embedding_type": "absolute", "mask_token_id": 3},
    "AlbertModel": {"embedding_size": 64},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LONGEST],
)
def test_the_longest_text_has_a_position_for_each_token(name: str, tmp_path: Path) -> None:
    model_class = getattr(transformers, name)
    fields = {**SIZES, **ENCODERS.get(name, (None, {}))[1], **EXTRA.get(name, {})}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**fields)).eval()
    with torch.inference_mode():
        longest = LONGEST[name]
        ids = torch.full((1, longest), 5)
        wanted = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].mean(0)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    embedder = Embedder(tmp_path, config=EngineConfig(model_impl="transformers"))
    assert embedder.max_model_len == longest
    (found,) = embedder.embed([[5] * longest])
    torch.testing.assert_close(torch.tensor(found.embedding), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(PromptError, match=f"the context is {longest} tokens"):
        embedder.embed([[5] * (longest + 1)])


def test_an_encoder_whose_texts_have_no_longest_length(tmp_path: Path) -> None:
    config = transformers.XLNetConfig(vocab_size=320, d_model=64, n_layer=2, n_head=4, d_inner=96)
    transformers.XLNetModel(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"XLNetModel .* max_position_embeddings"):
        Embedder(tmp_path)


def test_bert_by_transformers(tmp_path: Path) -> None:
    model: Any = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    assert_near(vectors(tmp_path), vectors(tmp_path, model_impl="transformers"))


def test_dummy_weights(tmp_path: Path) -> None:
    write(tmp_path, "ModernBertModel")
    (tmp_path / "model.safetensors").unlink()
    first, second = (vectors(tmp_path, load_format="dummy", seed=seed) for seed in (3, 3))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    write(tmp_path, "DistilBertModel")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["embeddings.LayerNorm.bias"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 missing: embeddings\.LayerNorm\.bias"):
        Embedder(tmp_path)

"""GGUF files give the logits of transformers' models with the same, dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.compared_logits import close, logits, theirs
from engine.gguf_files import write
from models import layer_checkpoints, tiny_checkpoints
from opweave_engine import load_model
from opweave_engine.load.loader import check_ranks
from opweave_engine.models import UnsupportedModelError

WIDE = {"hidden_size": 256, "intermediate_size": 512}
FORMATS = [Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K,
           Kind.Q6_K]  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_formats(kind: Kind, tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("llama", **WIDE)
    plain = theirs(model)
    path = write(tmp_path / "model.gguf", model, lambda _: kind)
    assert close(logits(path), theirs(model))
    assert not close(plain, theirs(model))


@pytest.mark.parametrize("kind", ["llama", "llama3_rope", "linear_rope", "tied", "head_dim",
                                  "qwen2", "qwen3", "biases"])  # fmt: skip
def test_models(kind: str, tmp_path: Path) -> None:
    changes = {"biases": {"mlp_bias": False}, "head_dim": {"head_dim": 32}}
    model = tiny_checkpoints.hf_model(kind, **changes.get(kind, {}))
    path = write(tmp_path / "model.gguf", model, lambda _: Kind.Q8_0)
    assert close(logits(path), theirs(model))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gemma3"])
def test_models_of_layers(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = layer_checkpoints.hf_model(kind)
    if kind == "gemma3":  # the file has no key for it: llama.cpp takes the head size
        for layer in model.model.layers:
            layer.self_attn.scaling = model.config.head_dim**-0.5
    path = write(
        tmp_path / "model.gguf", model, lambda _: Kind.F32 if kind == "qwen3_moe" else Kind.Q8_0
    )
    assert close(logits(path), theirs(model))
    assert "proj" not in caplog.text
    assert "w1" not in caplog.text


def mixed(name: str) -> Kind:
    if "v_proj" in name or "down_proj" in name:
        return Kind.Q6_K
    return Kind.F32 if "gate_proj" in name else Kind.Q4_K


def test_different_formats_in_one_layer(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("llama", **WIDE)
    path = write(tmp_path / "model.gguf", model, mixed)
    assert close(logits(path), theirs(model))
    layer = load_model(path).model.layers[0]
    sizes = {name: p.dtype for name, p in layer.named_parameters() if "proj" in name}
    assert sizes["self_attn.qkv_proj.v_proj.weight"] == torch.uint8
    assert sizes["mlp.gate_up_proj.gate_proj.weight"] == torch.bfloat16
    assert sizes["mlp.down_proj.weight"] == torch.uint8


def test_quantized_weights_stay_quantized(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("llama")
    path = write(tmp_path / "model.gguf", model, lambda _: Kind.Q4_0)
    loaded = load_model(path)
    assert loaded.dtype is torch.bfloat16
    kept = [p for name, p in loaded.named_parameters() if "proj" in name]
    assert {p.dtype for p in kept} == {torch.uint8}
    # 18 bytes for 32 weights
    assert sum(p.nbytes for p in kept) * 32 == 18 * sum(
        p.numel() for name, p in model.named_parameters() if "proj" in name
    )


@pytest.mark.parametrize("kind", ["tied", "llama"])
def test_tables_stay_quantized(kind: str, tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model(kind)
    path = write(tmp_path / "model.gguf", model, lambda _: Kind.Q8_0)
    loaded = load_model(path)
    embedding, head = loaded.model.embed_tokens.weight, loaded.lm_head.weight
    assert embedding.dtype is head.dtype is torch.uint8
    assert (embedding is head) == (kind == "tied")
    assert close(logits(path), theirs(model))


def test_a_vocabulary_with_padding(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("tied", vocab_size=321)
    path = write(tmp_path / "model.gguf", model, lambda _: Kind.Q4_0)
    check_ranks(path, 2)
    assert load_model(path).model.embed_tokens.weight.shape[0] == 384
    assert close(logits(path), theirs(model))


def test_a_model_of_transformers_is_not_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", tiny_checkpoints.hf_model("llama"))
    with pytest.raises(UnsupportedModelError, match="GGUF"):
        load_model(path, model_impl="transformers")

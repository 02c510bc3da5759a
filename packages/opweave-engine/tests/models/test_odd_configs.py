"""Unusual config.json files and tensor names give the results that transformers gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers import Gemma3Config as Gemma3HfConfig
from transformers import Gemma3ForConditionalGeneration as HfGemma3

from models.comparing import SIZES, check_as_transformers, write
from models.tiny_checkpoints import edit_config, randomized
from opweave_engine import CheckpointError, load_model
from opweave_engine.models import Gemma3Config, InvalidConfigError, LlamaConfig
from opweave_engine.models.config import ACTIVATIONS

DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 5, "num_hidden_layers": 4,
}  # fmt: skip
MIXTRAL = {"num_experts_per_tok": 2, "num_local_experts": 6}
QWEN3_MOE = {
    "num_experts_per_tok": 2, "num_experts": 6, "moe_intermediate_size": 40, "head_dim": 24,
}  # fmt: skip
SHORT, LONG = ([start + step * i for i in range(12)] for start, step in ((1.0, 0.1), (2.0, 0.3)))


SLIDING: dict[str, Any] = {"rope_type": "default", "rope_theta": 7e3}


def longrope(pairs: int, **others: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 400,
        "short_factor": SHORT[:pairs], "long_factor": LONG[:pairs], **others,
    }  # fmt: skip


def gemma_rope(full: dict[str, Any], sliding: dict[str, Any] | None = SLIDING) -> dict[str, Any]:
    ropes = {"full_attention": full, "sliding_attention": sliding}
    return {"layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": ropes}


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
FULL = {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}

# Name -> the model type, its configuration, and what is changed in config.json.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "deepseek norm_topk_prob null": ("deepseek_v3", DEEPSEEK, {"norm_topk_prob": None}),
    "deepseek rope_interleave null": ("deepseek_v3", DEEPSEEK, {"rope_interleave": None}),
    "deepseek without shared experts": (
        "deepseek_v3", {**DEEPSEEK, "n_shared_experts": 0}, {},
    ),
    "gemma _sliding_window_pattern": (
        "gemma3_text", GEMMA, {"_sliding_window_pattern": 2, "layer_types": None},
    ),
    "gemma sliding_window_pattern": (
        "gemma3_text", GEMMA, {"sliding_window_pattern": 2, "layer_types": None},
    ),
    "gemma nested and flat theta": (
        "gemma3_text", GEMMA,
        {**gemma_rope(FULL), "rope_theta": 123.0, "rope_local_base_freq": 45.0},
    ),
    "gemma nested and flat scaling": (
        "gemma3_text", GEMMA, {**gemma_rope(FULL), "rope_scaling": LINEAR, "rope_theta": 123.0},
    ),
    "gemma nested full attention alone": (
        "gemma3_text", GEMMA, {**gemma_rope(FULL, None), "rope_local_base_freq": 45.0},
    ),
    "gemma flat scaling": (
        "gemma3_text", GEMMA,
        {**gemma_rope(FULL), "rope_parameters": None, "rope_theta": 5e4, "rope_scaling": LINEAR},
    ),
    "llama dynamic": ("llama", {}, {"rope_parameters": DYNAMIC}),
    "qwen2 dynamic of version 4": (
        "qwen2", {},
        {"rope_parameters": None, "rope_theta": 5e4,
         "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ),
    "deepseek dynamic": (
        "deepseek_v3", DEEPSEEK, {"rope_parameters": {**DYNAMIC, "mscale_all_dim": 1.0}},
    ),
    "gemma dynamic": ("gemma3_text", GEMMA, gemma_rope(DYNAMIC)),
    "llama proportional": ("llama", {}, {"rope_parameters": PROPORTIONAL}),
    "mistral proportional with a factor": (
        "mistral", {}, {"rope_parameters": {**PROPORTIONAL, "factor": 3.0}},
    ),
    "qwen3 proportional with a separate share": (
        "qwen3", {"head_dim": 24},
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4},
         "partial_rotary_factor": 0.3},
    ),
    "deepseek proportional": ("deepseek_v3", DEEPSEEK, {"rope_parameters": PROPORTIONAL}),
    "gemma proportional": ("gemma3_text", GEMMA, gemma_rope(PROPORTIONAL)),
    "llama longrope": ("llama", {}, {"rope_parameters": longrope(8)}),
    "llama longrope with a factor": ("llama", {}, {"rope_parameters": longrope(8, factor=4.0)}),
    "qwen3_moe longrope": (
        "qwen3_moe", QWEN3_MOE, {"rope_parameters": longrope(12, attention_factor=1.5)},
    ),
    "deepseek longrope": ("deepseek_v3", DEEPSEEK, {"rope_parameters": longrope(4)}),
    "gemma longrope": ("gemma3_text", GEMMA, gemma_rope(longrope(12))),
    "longrope with a separate training context": (
        "llama", {},
        {"rope_parameters": None, "rope_theta": 1e4, "original_max_position_embeddings": 400,
         "rope_scaling": {"type": "longrope", "short_factor": SHORT[:8], "long_factor": LONG[:8]}},
    ),
    "llama partial rotary": (
        "llama", {},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                             "partial_rotary_factor": 0.5}},
    ),
    "mixtral partial rotary": ("mixtral", MIXTRAL, {"partial_rotary_factor": 0.5}),
    **{
        f"llama {name}": ("llama", {"hidden_act": name}, {})
        for name in ACTIVATIONS
    },
    "qwen3 relu": ("qwen3", {"hidden_act": "relu", "head_dim": 16}, {}),
    "gemma silu": ("gemma3_text", {**GEMMA, "hidden_activation": "silu"}, {}),
    "mixtral gelu": ("mixtral", {**MIXTRAL, "hidden_act": "gelu"}, {}),
    "qwen3_moe gelu": (
        "qwen3_moe", {**QWEN3_MOE, "hidden_act": "gelu_pytorch_tanh", "mlp_only_layers": [0]}, {},
    ),
    "deepseek swish": ("deepseek_v3", {**DEEPSEEK, "hidden_act": "swish"}, {}),
    "deepseek gelu": ("deepseek_v3", {**DEEPSEEK, "hidden_act": "gelu"}, {}),
    "mistral with layer types": (
        "mistral", {"sliding_window": 5}, {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "mistral with null layer types": ("mistral", {"sliding_window": 5}, {"layer_types": None}),
    "an empty rope_scaling and rope_parameters": (
        "llama", {}, {"rope_parameters": FULL, "rope_scaling": {}},
    ),
    "rope_scaling and rope_parameters": (
        "llama", {}, {"rope_parameters": FULL, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "yarn with a null factor": (
        "llama", {},
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": None,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}  # fmt: skip

# transformers makes empty tensors for no shared experts.
EMPTY = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


@EMPTY
@pytest.mark.parametrize("case", CASES)
def test_as_transformers(case: str, tmp_path: Path) -> None:
    model_type, changes, edits = CASES[case]
    check_as_transformers(write(tmp_path, model_type, changes, edits))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("mixtral", MIXTRAL), ("qwen3_moe", QWEN3_MOE), ("deepseek_v3", DEEPSEEK)],
)
def test_experts_in_one_tensor(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, model_type, changes, save_original_format=False)
    tensors = load_file(path / "model.safetensors")
    assert tensors["model.layers.1.mlp.experts.gate_up_proj"].ndim == 3
    check_as_transformers(path)
    # Each weight is needed once.
    name = "model.layers.1.mlp.experts.down_proj"
    kept = {n: t for n, t in tensors.items() if n != name}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"(6|8) missing: model.layers.1.*experts.0\..*"):
        load_model(path)
    fused = {**tensors, name: tensors[name][:, :, :-1].contiguous()}
    save_file(fused, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 do not fit: .*experts.down_proj: w2"):
        load_model(path)


def test_an_expert_both_alone_and_among_all(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3_moe", QWEN3_MOE, save_original_format=False)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    save_file({**tensors, name: torch.zeros(64, 40)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 given twice: "):
        load_model(path)


def test_a_rope_that_versions_of_transformers_read_differently() -> None:
    scaling = {"type": "linear", "factor": 8.0}
    with pytest.raises(InvalidConfigError, match=r"'type': 'linear' and no 'rope_type': .*Write"):
        Gemma3Config.from_hf({**SIZES, "rope_scaling": scaling})
    for agreed in ({**scaling, "rope_type": "linear"}, {"rope_type": "linear", "factor": 8.0}):
        ropes = Gemma3Config.from_hf({**SIZES, "rope_scaling": agreed}).ropes
        assert ropes["full_attention"]["rope_type"] == "linear"
    nested = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}}
    both = Gemma3Config.from_hf({**SIZES, "rope_scaling": scaling, "rope_parameters": nested})
    assert both.ropes["full_attention"]["factor"] == 8.0


def test_yarn_without_a_factor() -> None:
    base = {"architectures": ["LlamaForCausalLM"], **SIZES}
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    assert LlamaConfig.from_hf({**base, "rope_parameters": rope}).rope["factor"] == 8.0
    with pytest.raises(InvalidConfigError, match="neither 'factor' nor 'original_max_position"):
        LlamaConfig.from_hf({**base, "rope_parameters": {"rope_type": "yarn"}})


@EMPTY
def test_shared_experts_that_are_null(tmp_path: Path) -> None:
    """The original configurations of DeepSeek write null for none; transformers refuses it."""
    path = write(tmp_path, "deepseek_v3", {**DEEPSEEK, "n_shared_experts": 0})
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    edit_config(path, n_shared_experts=None)
    model = load_model(path)
    ids = torch.arange(4, 13)
    with torch.inference_mode():
        found = model.compute_logits(model(ids, torch.arange(9)))  # type: ignore[attr-defined]
        torch.testing.assert_close(found, reference(ids[None]).logits[0], rtol=0, atol=1e-4)


def gemma_with_vision(path: Path, text: dict[str, Any]) -> dict[str, Any]:
    """Save a random Gemma 3 that sees images; return the object in its config.json."""
    config = Gemma3HfConfig(
        text_config={**SIZES, **GEMMA, **text},
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        mm_tokens_per_image=4, image_token_index=300, boi_token_index=301, eoi_token_index=302,
    )  # fmt: skip
    torch.manual_seed(5)
    randomized(HfGemma3(config)).save_pretrained(path)
    written: dict[str, Any] = json.loads((path / "config.json").read_text())
    return written


@pytest.mark.parametrize("names", ["as written", "as in the model"])
def test_the_language_model_of_gemma_with_vision(names: str, tmp_path: Path) -> None:
    written = gemma_with_vision(tmp_path, {"layer_types": None, "sliding_window_pattern": 2})
    # The published configurations leave out what has a default.
    for key in ("layer_types", "_sliding_window_pattern", "rms_norm_eps", "hidden_activation"):
        written["text_config"].pop(key)
    written["text_config"]["sliding_window_pattern"] = 2
    (tmp_path / "config.json").write_text(json.dumps(written))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("vision_tower.") for name in tensors)
    check_as_transformers(tmp_path)
    if names == "as in the model":  # as transformers 5 names them in a state dict
        prefixes = {"language_model.model.": "model.language_model.", "vision": "model.vision"}
        renamed = {}
        for name, tensor in tensors.items():
            old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
            renamed[prefixes.get(old, "") + name.removeprefix(old)] = tensor
        save_file(renamed, file, metadata={"format": "pt"})
        check_as_transformers(tmp_path, lengths=(9,))


def test_layers_of_gemma_with_vision_are_counted(tmp_path: Path) -> None:
    written = gemma_with_vision(tmp_path, {})
    written["text_config"]["num_hidden_layers"] = 10**6
    written["text_config"]["layer_types"] = None
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(CheckpointError, match="num_hidden_layers=1000000, but the number"):
        load_model(tmp_path)


def test_keys_that_transformers_reads_and_forgets() -> None:
    """They are applied, for which docs/how-to/checkpoints.md gives the reason."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "truncate": False}
    config = {**SIZES, "attn_logit_softcapping": 30.0, "rope_parameters": {"full_attention": yarn}}
    ours = Gemma3Config.from_hf(config)
    assert ours.attn_logit_softcapping == 30.0
    assert ours.ropes["full_attention"]["truncate"] is False

"""config.json files of the models of layers mean what transformers takes them to mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

from opweave_engine.models import (
    BertConfig,
    DeepseekV3Config,
    Gemma3Config,
    InvalidConfigError,
    Qwen2VisionConfig,
    UnsupportedModelError,
    build_model,
    supported_architectures,
)

Checkpoints = Callable[[str], tuple[Path, Any]]
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LINEAR = {"type": "linear", "factor": 2.0}
OLD_YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}


DEEPSEEK_KEYS = """
    moe_intermediate_size q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
    n_routed_experts n_shared_experts num_experts_per_tok n_group topk_group norm_topk_prob
    routed_scaling_factor first_k_dense_replace max_position_embeddings rms_norm_eps rope_interleave
    attention_bias tie_word_embeddings
"""
GEMMA_KEYS = """
    head_dim max_position_embeddings rms_norm_eps query_pre_attn_scalar sliding_window
    attn_logit_softcapping final_logit_softcapping attention_bias tie_word_embeddings
"""
BERT_KEYS = "max_position_embeddings type_vocab_size layer_norm_eps hidden_act"


@pytest.mark.parametrize(
    ("read", "model_type", "names"),
    [
        (DeepseekV3Config.from_hf, "deepseek_v3", DEEPSEEK_KEYS),
        (Gemma3Config.from_hf, "gemma3_text", GEMMA_KEYS),
        (BertConfig.from_hf, "bert", BERT_KEYS),
    ],
)
def test_absent_keys_mean_what_they_mean_to_transformers(
    read: Callable[[dict[str, Any]], Any], model_type: str, names: str
) -> None:
    theirs, ours = AutoConfig.for_model(model_type, **SIZES), read(SIZES)
    for name in ("vocab_size", "hidden_size", "intermediate_size", *names.split()):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_absent_keys_of_the_vision_encoder() -> None:
    theirs, ours = Qwen2VLVisionConfig(), Qwen2VisionConfig.from_hf({})
    for name in ours.__dataclass_fields__:
        if name not in ("rope_theta", "dtype"):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope_theta == 10000.0


def test_gemma_has_a_rope_for_each_layer_type() -> None:
    new = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
    }
    older = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 7e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert Gemma3Config.from_hf({**SIZES, "rope_parameters": new}).ropes == new
    assert Gemma3Config.from_hf({**SIZES, **older}).ropes == new
    thetas = [rope["rope_theta"] for rope in Gemma3Config.from_hf(SIZES).ropes.values()]
    assert thetas == [1e6, 1e4]


def test_the_context_of_gemma_is_the_shortest_of_its_ropes() -> None:
    stretched = {"rope_type": "linear", "factor": 8.0}
    sizes = {**SIZES, "max_position_embeddings": 100}
    assert Gemma3Config.from_hf({**sizes, "rope_scaling": stretched}).max_positions == 100
    both = {"full_attention": stretched, "sliding_attention": {**stretched, "factor": 2.0}}
    assert Gemma3Config.from_hf({**sizes, "rope_parameters": both}).max_positions == 200


@pytest.mark.parametrize(("changes", "period"), [({}, 6), ({"sliding_window_pattern": 3}, 3)])
def test_every_nth_layer_of_gemma_sees_everything(changes: dict[str, Any], period: int) -> None:
    ours = Gemma3Config.from_hf({**SIZES, **changes})
    theirs = AutoConfig.for_model("gemma3_text", **SIZES, **changes)
    assert list(ours.layer_types) == theirs.layer_types
    assert [ours.window(layer) is None for layer in range(7)] == [
        (layer + 1) % period == 0 for layer in range(7)
    ]


def test_yarn_sharpens_the_attention_of_deepseek() -> None:
    plain = DeepseekV3Config.from_hf(SIZES)
    assert plain.softmax_scale == (128 + 64) ** -0.5
    scaled = DeepseekV3Config.from_hf({**SIZES, "rope_theta": 5e4, "rope_scaling": OLD_YARN})
    assert scaled.softmax_scale == pytest.approx(plain.softmax_scale * 1.3688879454113936**2)
    assert (scaled.rope["rope_type"], scaled.rope["rope_theta"]) == ("yarn", 5e4)
    direct = DeepseekV3Config.from_hf({**SIZES, "q_lora_rank": None})
    assert direct.q_lora_rank is None


DEEPSEEK, GEMMA, BERT = DeepseekV3Config, Gemma3Config, BertConfig
UNSUPPORTED: list[tuple[Any, dict[str, Any], str]] = [
    (DEEPSEEK, {"hidden_act": "relu"}, "'relu'.* Supported: gelu, .*silu"),
    (DEEPSEEK, {"quantization_config": {"bits": 8}}, "quantization_config"),
    (DEEPSEEK, {"rope_scaling": {"type": "spiral", "factor": 2.0}}, "'spiral'.*linear"),
    (
        DEEPSEEK,
        {"partial_rotary_factor": 0.5, "rope_scaling": LINEAR},
        "'partial_rotary_factor': 0.5",
    ),
    (DEEPSEEK, {"scoring_func": "softmax"}, "'scoring_func': 'softmax'.* Supported: sigmoid"),
    (DEEPSEEK, {"topk_method": "greedy"}, "'topk_method': 'greedy'.* Supported: noaux_tc"),
    (DEEPSEEK, {"moe_layer_freq": 2}, "'moe_layer_freq': 2"),
    (GEMMA, {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "'spiral'.*linear"),
    (
        GEMMA,
        {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "'partial_rotary_factor': 0.5",
    ),
    (GEMMA, {"hidden_activation": "mish"}, "Supported: gelu, gelu_pytorch_tanh"),
    (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (GEMMA, {"layer_types": ["chunked"] * 7}, "'chunked'.*full_attention, sliding_attention"),
    (BERT, {"hidden_act": "mish"}, "'mish'.*gelu, .*gelu_new, .*relu"),
    (BERT, {"is_decoder": True}, "is_decoder"),
    (BERT, {"position_embedding_type": "relative_key"}, "'relative_key'.*absolute"),
    (Qwen2VisionConfig, {"hidden_act": "silu"}, "Supported: quick_gelu"),
    (Qwen2VisionConfig, {"rope_parameters": {"rope_type": "yarn"}}, "'yarn'.*axial"),
]
INVALID: list[tuple[Any, dict[str, Any], str]] = [
    (DEEPSEEK, {"n_group": 7}, "256 'n_routed_experts' in 7 'n_group'"),
    (DEEPSEEK, {"topk_group": 9}, "9 'topk_group'"),
    (DEEPSEEK, {"n_group": 256}, "in 256 'n_group', 1 in each"),
    (DEEPSEEK, {"num_experts_per_tok": 129}, "129, but 'topk_group': 4 groups of 32 .* 128"),
    (DEEPSEEK, {"topk_group": 1, "num_experts_per_tok": 33}, "groups of 32 experts hold 32"),
    (DEEPSEEK, {"qk_rope_head_dim": 7}, "'qk_rope_head_dim': 7"),
    (DEEPSEEK, {"first_k_dense_replace": -1}, "integer from 0"),
    (DEEPSEEK, {"rope_scaling": {**LINEAR, "mscale_all_dim": "x"}}, "'mscale_all_dim': 'x'"),
    (DEEPSEEK, {"hidden_size": None}, "lacks 'hidden_size'"),
    (GEMMA, {"num_key_value_heads": 3}, "not a multiple"),
    (GEMMA, {"layer_types": ["full_attention"]}, "1 'layer_types' for 7 layers"),
    (GEMMA, {"final_logit_softcapping": -1.0}, "positive number"),
    (BERT, {"num_attention_heads": 5}, "not a multiple"),
    (Qwen2VisionConfig, {"num_heads": 17}, "'embed_dim': 1280 for 17"),
]


@pytest.mark.parametrize(("config", "changes", "message"), UNSUPPORTED)
def test_what_is_not_supported_is_said_with_what_is(
    config: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config.from_hf({**SIZES, **changes})


@pytest.mark.parametrize(("config", "changes", "message"), INVALID)
def test_what_is_wrong_is_named(config: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        config.from_hf({**SIZES, **changes})


def test_an_unknown_architecture_is_named_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'GPT2Model'.*BertModel.*Gemma3ForCausalLM"):
        build_model({"architectures": ["GPT2Model"]}, dtype=torch.float32)


def test_what_is_written_names_a_model(layer_checkpoint: Checkpoints) -> None:
    for kind in ("deepseek", "gemma3", "bert", "qwen2_vision"):
        config = json.loads((layer_checkpoint(kind)[0] / "config.json").read_text())
        assert config["architectures"][0] in supported_architectures()

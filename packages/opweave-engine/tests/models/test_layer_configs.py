"""config.json files of the models of layers mean what transformers takes them to mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from opweave_engine.models import (
    BertConfig,
    DeepseekV3Config,
    Gemma3Config,
    GptOssMoE,
    InvalidConfigError,
    LlamaConfig,
    Mamba2Config,
    MixtureConfig,
    UnsupportedModelError,
)

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MAMBA = {
    "hidden_size": 32, "num_heads": 8, "head_dim": 8, "n_groups": 2, "num_hidden_layers": 2,
}  # fmt: skip
LINEAR = {"type": "linear", "factor": 2.0}


SIZE_KEYS = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    max_position_embeddings rms_norm_eps tie_word_embeddings
"""
KEYS = {
    "deepseek_v3": """
        moe_intermediate_size q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
        n_routed_experts n_shared_experts num_experts_per_tok n_group topk_group norm_topk_prob
        routed_scaling_factor first_k_dense_replace rope_interleave attention_bias
    """,
    "gemma3_text": """
        head_dim query_pre_attn_scalar sliding_window attn_logit_softcapping
        final_logit_softcapping attention_bias
    """,
}
BERT_KEYS = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    max_position_embeddings type_vocab_size layer_norm_eps hidden_act
"""


@pytest.mark.parametrize(
    ("read", "model_type", "base"),
    [
        (LlamaConfig.from_hf, "llama", {"architectures": ["LlamaForCausalLM"]}),
        (LlamaConfig.from_hf, "mistral", {"architectures": ["MistralForCausalLM"]}),
        (LlamaConfig.from_hf, "qwen2", {"architectures": ["Qwen2ForCausalLM"]}),
        (LlamaConfig.from_hf, "qwen3", {"architectures": ["Qwen3ForCausalLM"]}),
        (MixtureConfig.from_hf, "mixtral", {"architectures": ["MixtralForCausalLM"]}),
        (MixtureConfig.from_hf, "qwen3_moe", {"architectures": ["Qwen3MoeForCausalLM"]}),
        (DeepseekV3Config.from_hf, "deepseek_v3", {}),
        (Gemma3Config.from_hf, "gemma3_text", {}),
    ],
)
def test_every_size_has_the_default_of_transformers(
    read: Any, model_type: str, base: dict[str, Any]
) -> None:
    theirs, ours = AutoConfig.for_model(model_type), read(base)
    for name in (*SIZE_KEYS.split(), *KEYS.get(model_type, "").split()):
        assert getattr(ours, name) == getattr(theirs, name), name
    if model_type != "deepseek_v3":
        assert ours.num_key_value_heads == theirs.num_key_value_heads
        assert ours.head_dim == (
            getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        )
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        with pytest.raises(InvalidConfigError, match=f"lacks '{name}'"):  # as transformers
            read({**base, name: None})
    if model_type == "gemma3_text":
        with pytest.raises(InvalidConfigError, match="lacks 'sliding_window'"):
            read({**base, "sliding_window": None})


def test_every_key_of_bert_has_the_default_of_transformers() -> None:
    theirs, ours = AutoConfig.for_model("bert"), BertConfig.from_hf({})
    for name in BERT_KEYS.split():
        assert getattr(ours, name) == getattr(theirs, name), name


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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 777.0},
        {"sliding_window": 9, "use_sliding_window": True},
        {"head_dim": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
        {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 4},
    ],
)
@pytest.mark.parametrize(
    ("model_type", "architecture"), [("mixtral", "Mixtral"), ("qwen3_moe", "Qwen3Moe")]
)
def test_absent_keys_of_mixtures(
    model_type: str, architecture: str, changes: dict[str, Any]
) -> None:
    theirs = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    named = {"architectures": [f"{architecture}ForCausalLM"]}
    ours = MixtureConfig.from_hf({**named, **SIZES, **changes})
    for name in ("max_position_embeddings", "rms_norm_eps", "num_key_value_heads", "vocab_size",
                 "intermediate_size", "num_experts_per_tok", "tie_word_embeddings"):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.num_experts == theirs.num_local_experts
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert {*ours.windows} == {theirs.sliding_window}
    assert ours.rope["rope_theta"] == theirs.rope_parameters["rope_theta"]
    if model_type == "qwen3_moe":
        assert ours.norm_topk_prob == theirs.norm_topk_prob
        assert ours.moe_intermediate_size == theirs.moe_intermediate_size
        assert list(ours.sparse_layers) == [
            layer not in theirs.mlp_only_layers and (layer + 1) % theirs.decoder_sparse_step == 0
            for layer in range(theirs.num_hidden_layers)
        ]


def mixture(config: dict[str, Any]) -> Any:
    return MixtureConfig.from_hf({"architectures": ["Qwen3MoeForCausalLM"], **config})


def mamba(config: dict[str, Any]) -> Any:
    return Mamba2Config.from_hf({**config, **MAMBA, **config.pop("mamba", {})})


def gpt_oss(config: dict[str, Any]) -> Any:
    return GptOssMoE.from_hf(config, dtype=torch.float32)


DEEPSEEK, GEMMA, BERT = DeepseekV3Config.from_hf, Gemma3Config.from_hf, BertConfig.from_hf
SPIRAL = {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}
PARTIAL = {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
UNSUPPORTED: list[tuple[Any, dict[str, Any], str]] = [
    *((read, SPIRAL, "'spiral'.*linear") for read in (DEEPSEEK, GEMMA, mixture)),
    *((read, PARTIAL, "'partial_rotary_factor': 0.5") for read in (DEEPSEEK, GEMMA, mixture)),
    *(
        (read, {"quantization_config": {"bits": 8}}, "quantization_config")
        for read in (DEEPSEEK, GEMMA, BERT, mixture, mamba, gpt_oss)
    ),
    (DEEPSEEK, {"hidden_act": "relu"}, "'relu'.* Supported: gelu, .*silu"),
    (DEEPSEEK, {"scoring_func": "softmax"}, "'scoring_func': 'softmax'.* Supported: sigmoid"),
    (DEEPSEEK, {"topk_method": "greedy"}, "'topk_method': 'greedy'.* Supported: noaux_tc"),
    (DEEPSEEK, {"moe_layer_freq": 2}, "'moe_layer_freq': 2"),
    (GEMMA, {"hidden_activation": "mish"}, "Supported: gelu, gelu_pytorch_tanh"),
    (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (GEMMA, {"layer_types": ["chunked"] * 7}, "'chunked'.*full_attention, sliding_attention"),
    (BERT, {"hidden_act": "mish"}, "'mish'.*gelu, .*gelu_new, .*relu"),
    (BERT, {"is_decoder": True}, "is_decoder"),
    (BERT, {"position_embedding_type": "relative_key"}, "'relative_key'.*absolute"),
    (mixture, {"hidden_act": "relu"}, "'hidden_act': 'relu'"),
    (mamba, {"hidden_act": "gelu"}, "'hidden_act': 'gelu'"),
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
    (mixture, {"num_key_value_heads": 3}, "not a multiple"),
    (mixture, {"hidden_size": 66}, "no 'head_dim'"),
    (mixture, {"num_experts_per_tok": 200}, "'num_experts_per_tok': 200"),
    (mixture, {"mlp_only_layers": [True]}, "mlp_only_layers"),
    (gpt_oss, {"num_local_experts": 2}, "'num_experts_per_tok': 4"),
    (mamba, {"mamba": {"num_heads": 7}}, "make 56 channels; 'hidden_size' 32 times"),
    (mamba, {"mamba": {"n_groups": 3}}, "not a multiple of 'n_groups': 3"),
    (mamba, {"time_step_limit": [1]}, "'time_step_limit': .*two numbers"),
    (mamba, {"time_step_limit": [0, {"x": 1}]}, "'time_step_limit'"),
    (mamba, {"state_size": "many"}, "'state_size': 'many'"),
]


@pytest.mark.parametrize(
    ("error", "read", "changes", "message"),
    [
        *((UnsupportedModelError, *case) for case in UNSUPPORTED),
        *((InvalidConfigError, *case) for case in INVALID),
    ],
)
def test_what_is_wrong_is_named(
    error: type[Exception], read: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=message):
        read({**SIZES, **changes})

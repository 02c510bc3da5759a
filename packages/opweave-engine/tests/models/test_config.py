"""config.json files of transformers 4 and 5 mean what transformers takes them to mean."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from transformers import AutoConfig

from models.tiny_checkpoints import LLAMA3_ROPE, LLAMAS, YARN, Checkpoints
from opweave_engine.models import (
    SUPPORTED_ARCHITECTURES,
    InvalidConfigError,
    LlamaConfig,
    ModelError,
    UnsupportedModelError,
)
from opweave_engine.models.config import Fields, max_positions, rope_parameters

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def raw(architecture: str = "Llama", **changes: Any) -> dict[str, Any]:
    return {"architectures": [f"{architecture}ForCausalLM"], **SIZES, **changes}


def as_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Return the same configuration as transformers 4 wrote it."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    old["torch_dtype"] = old.pop("dtype")
    kind = rope.pop("rope_type")
    key = "rope_type" if kind == "llama3" else "type"
    old["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    return old


@pytest.mark.parametrize("kind", LLAMAS)
def test_both_formats_parse_to_the_same(kind: str, checkpoint: Checkpoints) -> None:
    config = json.loads((checkpoint(kind)[0] / "config.json").read_text())
    assert "rope_parameters" in config
    new, old = LlamaConfig.from_hf(config), LlamaConfig.from_hf(as_version_4(config))
    kept = {k: v for k, v in old.rope.items() if k != "type"}
    assert new == dataclasses.replace(old, rope=kept)
    assert new.dtype == "float32"


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_attention_heads": 32, "hidden_size": 256},
        {"num_attention_heads": 32, "hidden_size": 256, "use_sliding_window": True},
        {"num_key_value_heads": None},
        {"num_key_value_heads": 2, "max_position_embeddings": 77, "rms_norm_eps": 1e-5},
        {"num_key_value_heads": 2, "sliding_window": 9, "use_sliding_window": True,
         "max_window_layers": 1},
        {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 1e6},
    ],
)  # fmt: skip
def test_absent_keys_mean_what_they_mean_to_transformers(
    model_type: str, changes: dict[str, Any]
) -> None:
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    if not changes and model_type != "llama":
        pytest.skip("4 heads cannot share the default number of key heads")
    if changes == {"num_key_value_heads": None} and model_type == "mistral":
        pytest.skip("transformers refuses a null there")
    theirs = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    ours = LlamaConfig.from_hf(raw(architecture[model_type], **changes))
    for name in ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", *SIZES):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    assert ours.rope == {k: theirs.rope_parameters[k] for k in ("rope_type", "rope_theta")}
    window = None if model_type == "llama" else theirs.sliding_window
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 3
    assert ours.windows == tuple(window if t == "sliding_attention" else None for t in types)


def test_flags_of_the_architectures() -> None:
    flags = {
        name: LlamaConfig.from_hf(
            {**raw(), "architectures": [name], "attention_bias": True, "mlp_bias": True,
             "num_key_value_heads": 2}
        )
        for name in SUPPORTED_ARCHITECTURES
    }  # fmt: skip
    found = {n: (c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm) for n, c in flags.items()}
    assert found == {
        "LlamaForCausalLM": (True, True, True, False),
        "MistralForCausalLM": (False, False, False, False),
        "Qwen2ForCausalLM": (True, False, False, False),
        "Qwen3ForCausalLM": (True, True, False, True),
    }


def test_the_prefix_of_a_dtype_is_dropped() -> None:
    assert LlamaConfig.from_hf(raw(torch_dtype="torch.bfloat16")).dtype == "bfloat16"
    assert LlamaConfig.from_hf(raw()).dtype is None


UNSUPPORTED = {
    "architecture": (raw("GPT2"), "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"),
    "activation": (raw(hidden_act="mish"), "'hidden_act': 'mish'.* Supported: gelu, .*silu"),
    "rope": (raw(rope_scaling={"rope_type": "spiral"}), "'spiral'.* default, .*linear, llama3"),
    "old rope": (raw(rope_scaling={"type": "spiral", "factor": 2.0}), "'spiral'.* default"),
    "partial": (raw(partial_rotary_factor=0.5, rope_scaling={"rope_type": "linear", "factor": 2.0}),
                "partial_rotary_factor.*Supported: 1.0"),
    "quantized": (
        raw(quantization_config={"quant_method": "fp8"}),
        r"quantized checkpoints \(quant_method 'fp8'\) are not supported; use unquantized weights",
    ),
    "quantized somehow": (raw(quantization_config={"bits": 4}), r"\(quant_method None\)"),
    "quantized by name": (raw(quantization_config="awq"), r"\(quant_method 'awq'\)"),
    "layer type": (raw("Qwen2", num_key_value_heads=4, use_sliding_window=True,
                       layer_types=["chunked"] * 3),
                   "'chunked'.* full_attention, sliding_attention"),
}  # fmt: skip
INVALID = {
    "no architecture": ({**SIZES}, "'architectures'.*LlamaForCausalLM"),
    "two architectures": (raw(architectures=["A", "B"]), "must name one of"),
    "not a list": (raw(architectures="LlamaForCausalLM"), "list of strings"),
    "missing size": (raw(hidden_size=None), "lacks 'hidden_size'"),
    "text for a size": (raw(vocab_size="320"), "'vocab_size': '320'; .*positive integer"),
    "true for a size": (raw(vocab_size=True), "positive integer"),
    "zero": (raw(num_hidden_layers=0), "'num_hidden_layers': 0"),
    "negative epsilon": (raw(rms_norm_eps=-1e-6), "positive number"),
    "nan": (raw(rms_norm_eps=float("nan")), "positive number"),
    "infinity": (raw(rms_norm_eps=float("inf")), "inf; it must be a finite positive number"),
    "no float": (raw(rms_norm_eps=10**400), "<an integer of 1329 bits>; it must be a finite"),
    "no size": (raw(hidden_size=2**63), "'hidden_size': 9223372036854775808; .* below 2.*63"),
    "long text": (raw(vocab_size="x" * 10**6), r"'x+…x+'; it must be a positive integer"),
    "infinite theta": (raw(rope_theta=float("inf")), "'rope_theta': inf; .*finite"),
    "flag": (raw(attention_bias="yes"), "true or false"),
    "dtype": (raw(dtype=16), "'dtype': 16; it must be a string"),
    "groups": (raw(num_key_value_heads=3), "not a multiple"),
    "head size": (raw(hidden_size=66), "not a multiple"),
    "odd head": (raw(head_dim=7), "odd"),
    "rope object": (raw(rope_scaling="llama3"), "JSON object"),
    "rope factor": (raw(rope_scaling={"rope_type": "linear"}), "factor must be a positive number"),
    "rope order": (raw(rope_scaling={**LLAMA3_ROPE, "high_freq_factor": 1.0}), "must be less than"),
    "layer types": (raw("Qwen2", num_key_value_heads=4, use_sliding_window=True, layer_types=["x"]),
                    "1 'layer_types' for 3 layers"),
    "window layers": (raw("Qwen2", num_key_value_heads=4, use_sliding_window=True,
                          max_window_layers=-1), "max_window_layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_not_supported_is_said_with_what_is(case: str) -> None:
    config, message = UNSUPPORTED[case]
    with pytest.raises(UnsupportedModelError, match=message) as error:
        LlamaConfig.from_hf(config)
    assert isinstance(error.value, ModelError)


@pytest.mark.parametrize("case", INVALID)
def test_what_is_wrong_is_named(case: str) -> None:
    config, message = INVALID[case]
    with pytest.raises(InvalidConfigError, match=message) as error:
        LlamaConfig.from_hf(config)
    assert isinstance(error.value, ModelError)


# The parameters of rotary embedding are read from every format, and checked


def read(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    return rope_parameters(Fields(config), 512, **options)


def test_without_any_the_model_says_the_base() -> None:
    assert read({}) == {"rope_type": "default", "rope_theta": 10000.0}
    assert read({}, theta=5e5)["rope_theta"] == 5e5
    assert read({"rope_theta": 7e3}, theta=5e5)["rope_theta"] == 7e3


@pytest.mark.parametrize("parameters", [LLAMA3_ROPE, YARN], ids=["llama3", "yarn"])
def test_formats(parameters: dict[str, Any]) -> None:
    assert read({"rope_parameters": parameters}) == parameters
    older = {k: v for k, v in parameters.items() if k not in ("rope_theta", "rope_type")}
    found = read({"rope_theta": 10000, "rope_scaling": {"type": parameters["rope_type"], **older}})
    assert found == {**parameters, "type": parameters["rope_type"]}


def test_the_context_of_training_may_stand_beside_the_others() -> None:
    given = {"original_max_position_embeddings": 64, "rope_parameters": LLAMA3_ROPE}
    assert read(given) == {**LLAMA3_ROPE, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("parameters", [LLAMA3_ROPE, YARN], ids=["llama3", "yarn"])
def test_or_else_it_is_the_context_of_the_model(parameters: dict[str, Any]) -> None:
    rope = {k: v for k, v in parameters.items() if k != "original_max_position_embeddings"}
    assert read({"rope_parameters": rope})["original_max_position_embeddings"] == 512


@pytest.mark.parametrize(("rope", "error", "message"), [
    ({"rope_type": "spiral"}, UnsupportedModelError,
     "'spiral'.*: default, dynamic, linear, llama3, longrope, proportional, yarn"),
    ({"rope_type": "dynamic"}, InvalidConfigError, "lacks 'factor'"),
    ({"rope_type": "longrope", "factor": 2.0}, InvalidConfigError, "short_factor must be"),
    ({"rope_type": "longrope", "short_factor": [1.0], "original_max_position_embeddings": 0},
     InvalidConfigError, "'original_max_position_embeddings': 0"),
    ({"type": "mrope", "mrope_section": [2, 1, 1]}, UnsupportedModelError, "'mrope'"),
    ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, UnsupportedModelError,
     "0.5, .*Supported: 1.0"),
    ({"rope_type": "proportional", "partial_rotary_factor": 1.5}, InvalidConfigError,
     "it must be at most 1"),
    ({"partial_rotary_factor": "1"}, InvalidConfigError, "positive number"),
    ({"rope_dim": 8}, UnsupportedModelError, "'rope_dim'.*heads are rotated whole"),
    ({"rope_type": 3}, InvalidConfigError, "'rope_type': 3; it must be a string"),
    ({"rope_theta": -1}, InvalidConfigError, "positive number"),
    ({"rope_type": "linear"}, InvalidConfigError, "'rope_parameters' in config.json: .*factor"),
    ({**LLAMA3_ROPE, "high_freq_factor": 1.0}, InvalidConfigError, "low_freq_factor=1.0"),
    ({"factor": float("inf")}, InvalidConfigError, "'factor': inf; it must be finite"),
    ({"long_factor": [1.0, float("nan")]}, InvalidConfigError, r"\[1.0, nan\]; it must be fin"),
    ({"rope_type": "linear", "factor": 1e9}, InvalidConfigError, "5.12e.11 positions; there"),
    ({**YARN, "factor": 1e300, "original_max_position_embeddings": 10**300}, InvalidConfigError,
     "makes no table: cannot convert"),
    ({**YARN, "original_max_position_embeddings": 0.5}, InvalidConfigError, "by zero"),
    ({**YARN, "rope_theta": 1.0}, InvalidConfigError, "makes no table: .*by zero"),
    ({**YARN, "beta_fast": "32"}, InvalidConfigError, "beta_fast must be .*number, found '32'"),
    ({**YARN, "beta_fast": False}, InvalidConfigError, "beta_fast must be .*, found False"),
    ({**YARN, "beta_slow": [1]}, InvalidConfigError, r"beta_slow must be .*, found \[1\]"),
    ({**YARN, "attention_factor": -1}, InvalidConfigError, "attention_factor must be a pos"),
    ({**YARN, "attention_factor": 0}, InvalidConfigError, "attention_factor must be a pos"),
    ({**YARN, "mscale": -1}, InvalidConfigError, "mscale must be a positive number"),
    ({**YARN, "mscale_all_dim": "x"}, InvalidConfigError, "mscale_all_dim must be"),
    ({**YARN, "truncate": "x"}, InvalidConfigError, "truncate must be true or false, found"),
    ({"mrope_section": 3}, InvalidConfigError, "mrope_section must be a list of integers"),
    ({"mrope_section": [1.5]}, InvalidConfigError, r"mrope_section .*, found \[1.5\]"),
])  # fmt: skip
def test_errors(rope: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read({"rope_parameters": rope})


def test_a_table_has_as_many_positions_as_can_be_told_apart() -> None:
    rope_parameters(Fields({}), 2**24)
    message = r"^max_position_embeddings=1000000000, .* table of 1e.09 positions; .*16777216\."
    with pytest.raises(InvalidConfigError, match=message):
        rope_parameters(Fields({}), 10**9)


def test_null_and_zero_mean_what_they_mean_to_transformers() -> None:
    absent = {"beta_fast": 0, "beta_slow": None, "mscale": 0, "attention_factor": None}
    read({"rope_parameters": {**YARN, **absent, "truncate": False, "mrope_section": None}})


@pytest.mark.parametrize("share", ["partial_rotary_factor", "rope_dim"])
def test_a_part_of_a_head_may_be_named_beside_the_others(share: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^config\.json has '{share}'"):
        read({share: 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})


@pytest.mark.parametrize("place", ["rope", "config"])
def test_a_share_that_transformers_ignores(place: str, caplog: pytest.LogCaptureFixture) -> None:
    share = {"partial_rotary_factor": 0.5}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    given = {"rope_parameters": {**rope, **share}} if place == "rope" else share
    assert read(given) == {"rope_type": "default", "rope_theta": 1e4}
    assert "which is ignored, as in transformers" in caplog.text


@pytest.mark.parametrize(("rope", "longest"), [
    ({}, 512),
    ({"rope_type": "linear", "factor": 2.5}, 1280),
    (LLAMA3_ROPE, 512),
    ({**YARN, "original_max_position_embeddings": 512}, 1536),  # Qwen's recipe
    ({**YARN, "original_max_position_embeddings": 100}, 512),  # DeepSeek's: named already
    ({"rope_type": "dynamic", "factor": 4.0}, 512),  # above it, the base would change
    ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0],
      "original_max_position_embeddings": 64}, 64),
])  # fmt: skip
def test_the_longest_sequence_is_that_of_the_table(rope: dict[str, Any], longest: int) -> None:
    assert max_positions(read({"rope_parameters": rope}), 512) == longest

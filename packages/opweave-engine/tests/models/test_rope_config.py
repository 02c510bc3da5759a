"""The parameters of rotary embedding are read from every format, and checked."""

from __future__ import annotations

from typing import Any

import pytest

from models.tiny_checkpoints import LLAMA3_ROPE, YARN
from opweave_engine.models import InvalidConfigError, UnsupportedModelError
from opweave_engine.models.config import Fields, max_positions, rope_parameters


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

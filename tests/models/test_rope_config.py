"""The parameters of rotary embedding are read from every format, and checked."""

from __future__ import annotations

from typing import Any

import pytest

from models.tiny_checkpoints import LLAMA3_ROPE, YARN
from opweave.models import InvalidConfigError, UnsupportedModelError
from opweave.models.fields import Fields
from opweave.models.rope_config import rope_parameters


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


@pytest.mark.parametrize(
    ("rope", "error", "message"),
    [
        ({"rope_type": "spiral"}, UnsupportedModelError, "'spiral'.* default, dynamic, linear"),
        ({"rope_type": 3}, InvalidConfigError, "'rope_type': 3; it must be a string"),
        ({"rope_theta": -1}, InvalidConfigError, "positive number"),
        ({"rope_type": "linear"}, InvalidConfigError, "'rope_parameters' in config.json: .*factor"),
        ({**LLAMA3_ROPE, "high_freq_factor": 1.0}, InvalidConfigError, "low_freq_factor=1.0"),
        ({"rope_type": "longrope", "short_factor": 3}, InvalidConfigError, "must be a list"),
        ({"factor": float("inf")}, InvalidConfigError, "'factor': inf; it must be finite"),
        ({"long_factor": [1.0, float("nan")]}, InvalidConfigError, r"\[1.0, nan\]; it must be fin"),
        ({"rope_type": "linear", "factor": 1e9}, InvalidConfigError, "5.12e.11 positions; there"),
        (
            {**YARN, "factor": 1e300, "original_max_position_embeddings": 10**300},
            InvalidConfigError,
            "makes no table: cannot convert",
        ),
        ({**YARN, "original_max_position_embeddings": 0.5}, InvalidConfigError, "by zero"),
    ],
)
def test_errors(rope: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read({"rope_parameters": rope})


def test_a_table_has_as_many_positions_as_can_be_told_apart() -> None:
    rope_parameters(Fields({}), 2**24)
    message = r"^max_position_embeddings=1000000000, .* table of 1e.09 positions; .*16777216\."
    with pytest.raises(InvalidConfigError, match=message):
        rope_parameters(Fields({}), 10**9)


def test_a_model_may_support_some_types_only() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'yarn'.*Supported: default, linear"):
        read({"rope_parameters": YARN}, supported=("default", "linear"))

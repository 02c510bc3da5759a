"""Every scaling against transformers' frequencies and magnitude."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from opweave.layers import LayerArgumentError, MRotaryEmbedding, RotaryEmbedding, get_rope
from opweave.layers.rotary_scaling import ROPE_TYPES, LongRopeScaling, Scaling

HEAD, TRAINED = 64, 128


def scaling(rope_type: str, factor: float | None = 4.0, **options: Any) -> dict[str, Any]:
    """The parameters of a type for a model that was trained on 32 positions."""
    factors = {} if factor is None else {"factor": factor}
    trained = {"original_max_position_embeddings": 32}
    return {"rope_type": rope_type, **factors, **trained, **options}


PARAMETERS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": scaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": scaling("yarn"),
    "yarn-betas": scaling("yarn", beta_fast=8.0, beta_slow=2.0, truncate=False),
    "yarn-step": scaling("yarn", 2.0, beta_fast=1e9, beta_slow=1e9),
    "yarn-deepseek": scaling("yarn", 40.0, mscale=0.707, mscale_all_dim=1.0),
    "yarn-factor": scaling("yarn", attention_factor=1.7),
    "proportional": {"rope_type": "proportional", "factor": 2.0},
    "longrope-short": scaling(
        "longrope",
        None,
        short_factor=[1.0 + 0.1 * i for i in range(HEAD // 2)],
        long_factor=[2.0 + 0.3 * i for i in range(HEAD // 2)],
    ),
}
PARAMETERS["dynamic-longer"] = PARAMETERS["dynamic"]
PARAMETERS["longrope-long"] = PARAMETERS["longrope-short"]
PARAMETERS["longrope-factor"] = {**PARAMETERS["longrope-short"], "attention_factor": 1.25}


def hugging_face(
    parameters: dict[str, Any], length: int | None, share: float, theta: float
) -> tuple[Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        head_dim=HEAD,
        max_position_embeddings=TRAINED,
        rope_parameters={**parameters, "rope_theta": theta, "partial_rotary_factor": share},
    )
    found: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        config, torch.device("cpu"), seq_len=length
    )
    return found


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize(("share", "theta"), [(1.0, 5e5), (0.5, 1e4)])
def test_frequencies_and_table(name: str, share: float, theta: float) -> None:
    parameters = dict(PARAMETERS[name])
    size = HEAD if name == "proportional" else int(HEAD * share)
    for key in ("short_factor", "long_factor"):
        if key in parameters:
            parameters[key] = parameters[key][: size // 2]
    longest = {"longrope-short": 16, "dynamic-longer": 3 * TRAINED}.get(name, TRAINED)
    frequencies, magnitude = hugging_face(parameters, longest, share, theta)
    given = {**parameters, "rope_theta": theta, "partial_rotary_factor": share}
    layer = get_rope(HEAD, TRAINED, True, given, torch.float32, max_model_len=longest)
    assert isinstance(layer, RotaryEmbedding)
    assert layer.rotary_dim == size
    assert layer.scaling.magnitude == pytest.approx(magnitude)
    found = layer.scaling.frequencies(size, theta)
    torch.testing.assert_close(found, frequencies, atol=0, rtol=1e-6)
    angles = torch.outer(torch.arange(len(layer.cos_sin_cache)).double(), frequencies.double())
    expected = torch.cat((angles.cos(), angles.sin()), -1) * magnitude
    torch.testing.assert_close(layer.cos_sin_cache.double(), expected, atol=2e-4, rtol=0)
    assert len(layer.cos_sin_cache) >= max(TRAINED, longest)


@pytest.mark.parametrize("name", ["plain", "linear", "dynamic", "llama3", "yarn"])
def test_rows_suffice_for_the_stretched_context(name: str) -> None:
    rows = {"plain": 128, "linear": 512, "dynamic": 128, "llama3": 128, "yarn": 128}
    layer = get_rope(HEAD, TRAINED, True, PARAMETERS.get(name), torch.float32)
    assert len(layer.cos_sin_cache) == rows[name]


# The types that transformers does not have, with the frequency of pair i of 32 and the magnitude.
# In float64, from the formulas of the sources.
VLLM: dict[str, tuple[dict[str, Any], Callable[[int], float], float]] = {
    "ntk": ({"factor": 4.0}, lambda i: (4e4) ** (-i / 32) * 4.0 ** (-1 / 32), 1.0),
    "ntk mixed": (
        {"factor": 4.0, "mixed_b": 0.6},
        lambda i: 1e4 ** (-i / 32) * 4.0 ** -(((i + 1) / 32) ** 0.6),
        1.0,
    ),
    "dynamic alpha": (
        {"alpha": 50.0},
        lambda i: (1e4 * 50.0 ** (64 / 62)) ** (-i / 32),
        1.0,
    ),
    "dynamic trained": (
        {"factor": 2.0, "max_trained_positions": 64},
        lambda i: (1e4 * 3.0 ** (64 / 62)) ** (-i / 32),  # 2 * 128 / 64 - 1
        1.0,
    ),
}


@pytest.mark.parametrize("name", VLLM)
def test_types_of_vllm(name: str) -> None:
    parameters, frequency, magnitude = VLLM[name]
    layer = get_rope(HEAD, TRAINED, True, {"rope_type": name.split()[0], **parameters})
    assert isinstance(layer, RotaryEmbedding)
    expected = torch.tensor([frequency(i) for i in range(HEAD // 2)])
    torch.testing.assert_close(layer.scaling.frequencies(HEAD, 1e4), expected, atol=0, rtol=1e-5)
    assert layer.scaling.magnitude == magnitude
    assert len(layer.cos_sin_cache) == TRAINED


@pytest.mark.parametrize("kind", ["deepseek_yarn", "deepseek_llama_scaling"])
@pytest.mark.parametrize(
    ("weights", "magnitude"),
    [
        ({}, 0.1 * math.log(40) + 1),
        ({"mscale": 0.5}, 0.05 * math.log(40) + 1),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
    ],
)
def test_yarn_of_deepseek(kind: str, weights: dict[str, float], magnitude: float) -> None:
    rest = {"factor": 40.0, "original_max_position_embeddings": 32}
    layer = get_rope(HEAD, TRAINED, True, {"rope_type": kind, **rest, **weights})
    plain = get_rope(HEAD, TRAINED, True, {"rope_type": "yarn", **rest})
    assert isinstance(layer, RotaryEmbedding)
    assert isinstance(plain, RotaryEmbedding)
    assert layer.scaling.magnitude == pytest.approx(magnitude)
    assert layer.scaling.frequencies(64, 1e4).equal(plain.scaling.frequencies(64, 1e4))
    assert len(layer.cos_sin_cache) == 1280


def test_every_type_is_tested() -> None:
    tested = {p["rope_type"] for p in PARAMETERS.values()} | {"default", "mrope"}
    tested |= {name.split()[0] for name in VLLM} | {"deepseek_yarn", "deepseek_llama_scaling"}
    assert set(ROPE_TYPES) == tested


def test_the_older_key_means_the_same() -> None:
    old = get_rope(HEAD, 64, True, {"type": "linear", "factor": 2.0})
    assert old is get_rope(HEAD, 64, True, {"rope_type": "linear", "factor": 2.0})


def test_plain_frequencies_one_by_one() -> None:
    found = Scaling().frequencies(8, 100.0)
    assert found.tolist() == pytest.approx([100.0 ** (-2 * i / 8) for i in range(4)])


def test_yarn_without_a_factor_takes_the_quotient_of_the_contexts() -> None:
    parameters = {"rope_type": "yarn", "original_max_position_embeddings": 32}
    layer = get_rope(HEAD, TRAINED, True, parameters)
    assert isinstance(layer, RotaryEmbedding)
    assert layer.scaling.magnitude == pytest.approx(0.1 * math.log(4.0) + 1)


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"rope_type": "yarm"}, "'yarm'.*yarn"),
        ({"rope_type": "linear"}, "'linear': factor.*None"),
        ({"rope_type": "linear", "factor": -1.0}, "factor.*-1.0"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        (scaling("llama3", low_freq_factor=4, high_freq_factor=4), "less than"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 8}, "long_factor"),
        ({"rope_type": "ntk"}, "'ntk': factor.*None"),
        ({"rope_type": "dynamic", "alpha": 0}, "'dynamic': alpha.*0"),
        (scaling("deepseek_yarn", mscale="1"), "mscale.*'1'"),
        (scaling("longrope", None, long_factor=[1.0]), "1 factors.*32"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor.*0.0"),
        ({"rope_theta": "big"}, "rope_theta.*'big'"),
        ({"rope_dim": 7}, "rotary_dim=7"),
        ({"rope_dim": 66}, "rotary_dim=66"),
        ({"mrope_section": [16, 16]}, "mrope_section"),
        ({"mrope_section": [16, 8, 9]}, "mrope_section"),
        ({"mrope_section": "abc"}, "mrope_section must be a list of integers, found 'abc'"),
        ({"mrope_section": [16, 8, 8], "mrope_interleaved": 1}, "mrope_interleaved must be true"),
        ({**PARAMETERS["longrope-long"], "attention_factor": "1"}, "attention_factor.*'1'"),
    ],
)
def test_mistakes(parameters: dict[str, Any], match: str) -> None:
    with pytest.raises(LayerArgumentError, match=match):
        get_rope(HEAD, TRAINED, True, parameters)


def test_dynamic_needs_more_than_one_pair() -> None:
    with pytest.raises(LayerArgumentError, match="more than 2"):
        get_rope(2, TRAINED, True, {"rope_type": "dynamic", "factor": 2.0})


def test_the_same_arguments_give_the_same_layer() -> None:
    one = get_rope(HEAD, 77, True, {"rope_theta": 1e4}, torch.float32)
    assert one is get_rope(HEAD, 77)
    assert one is not get_rope(HEAD, 77, False)
    assert one is not get_rope(HEAD, 77, dtype=torch.bfloat16)
    with torch.device("meta"):
        other = get_rope(HEAD, 77)
    assert other is not one
    assert other.cos_sin_cache.is_meta


def test_yarn_goes_with_mrope() -> None:
    parameters = {**PARAMETERS["yarn"], "mrope_section": [16, 8, 8]}
    layer = get_rope(HEAD, TRAINED, True, parameters)
    assert isinstance(layer, MRotaryEmbedding)
    assert layer.scaling.magnitude > 1


def test_longrope_of_short_factors() -> None:
    scaling = LongRopeScaling((1.0, 2.0), 1.0, 32)
    assert scaling.magnitude == 1.0
    assert scaling.frequencies(4, 1e4).tolist() == pytest.approx([1.0, 0.005])

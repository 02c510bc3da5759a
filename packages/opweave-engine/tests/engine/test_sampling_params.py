"""Sampling parameters: defaults, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from opweave_engine import EngineError, SamplingParams, SamplingParamsError
from opweave_engine.sampling.params import RequestSeeds


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert params.seed is None
    assert params.stop == ()
    assert not params.ignore_eos
    assert not params.is_greedy
    assert SamplingParams(temperature=0).is_greedy


def test_seeds() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
    seeds = RequestSeeds(0)
    assert [seeds.of(SamplingParams(seed=s)) for s in (5, -2, -(2**63))] == [5, 2**64 - 2, 2**63]
    assert seeds.of(SamplingParams(seed=-1)) != seeds.of(SamplingParams(seed=-1))


@pytest.mark.parametrize(
    "valid",
    [
        {"top_k": -1}, {"top_k": 50}, {"top_p": 1e-6}, {"top_p": 1}, {"max_tokens": 1},
        {"max_tokens": None}, {"seed": 0}, {"seed": 2**63 - 1}, {"seed": -(2**63)}, {"stop": "x"},
        {"stop": ["x", "yz"]}, {"stop": []}, {"temperature": 100.0}, {"ignore_eos": True},
        {"n": 1}, {"n": 128}, {"min_p": 0}, {"min_p": 1.0}, {"min_tokens": 16}, {"logprobs": 0},
        {"logprobs": 20}, {"prompt_logprobs": 3}, {"presence_penalty": -2}, {"logit_bias": None},
        {"frequency_penalty": 2.0}, {"repetition_penalty": 0.1}, {"repetition_penalty": 30},
        {"logit_bias": {}}, {"logit_bias": {5: -100, 0: 100.0}}, {"stop_token_ids": [0, 7]},
        {"skip_special_tokens": False}, {"max_tokens": None, "min_tokens": 900},
    ],
)  # fmt: skip
def test_what_is_allowed(valid: dict[str, Any]) -> None:
    SamplingParams(**valid)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1.5}, {"max_tokens": "3"},
        {"max_tokens": True}, {"temperature": -0.1}, {"temperature": math.nan},
        {"temperature": math.inf}, {"temperature": "hot"}, {"temperature": None}, {"top_p": 0},
        {"top_p": 0.0}, {"top_p": 1.01}, {"top_p": -0.5}, {"top_p": math.nan}, {"top_p": "1"},
        {"top_k": -2}, {"top_k": 2.0}, {"top_k": None}, {"seed": 1.0}, {"seed": 2**63},
        {"seed": -(2**63) - 1}, {"stop": ""}, {"stop": ["a", ""]}, {"stop": [1]}, {"stop": 5},
        {"stop": None}, {"ignore_eos": 1}, {"temperature": True}, {"n": 0}, {"n": 129},
        {"n": True}, {"min_p": -0.1}, {"min_p": 1.1}, {"min_tokens": -1}, {"min_tokens": 17},
        {"logprobs": -1}, {"logprobs": 21}, {"logprobs": True}, {"prompt_logprobs": 1.0},
        {"presence_penalty": 2.1}, {"presence_penalty": None}, {"frequency_penalty": -2.1},
        {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"repetition_penalty": math.inf},
        {"logit_bias": [1]}, {"logit_bias": {-1: 0}}, {"logit_bias": {"1": 0}},
        {"logit_bias": {1: 101}}, {"logit_bias": {1: math.nan}}, {"stop_token_ids": 3},
        {"stop_token_ids": [-1]}, {"stop_token_ids": ["a"]}, {"skip_special_tokens": 0},
        {"temperature": 10**400}, {"repetition_penalty": 10**400}, {"temperature": 10**5000},
        {"max_tokens": -(10**5000)}, {"allowed_token_ids": []}, {"allowed_token_ids": "5"},
        {"allowed_token_ids": [-1]}, {"bad_words": [""]}, {"bad_words": [5]},
        {"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2},
        {"include_stop_str_in_output": 1}, {"spaces_between_special_tokens": None},
    ],
)  # fmt: skip
def test_what_is_refused_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(SamplingParamsError, match=name) as error:
        SamplingParams(**wrong)
    assert error.value.parameter == name
    assert isinstance(error.value, EngineError)
    assert isinstance(error.value, ValueError)


def test_equal_parameters_are_equal() -> None:
    assert SamplingParams(stop="a") == SamplingParams(stop=["a"])
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop=("a",)))


def test_what_is_too_large_is_not_called_too_small() -> None:
    with pytest.raises(SamplingParamsError, match=r"max_tokens=9223372036854775808 must be below"):
        SamplingParams(max_tokens=2**63)

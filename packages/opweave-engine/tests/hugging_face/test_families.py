"""Representative architectures of transformers in the engine; ``make test-families`` has all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.nn import functional

from opweave_engine.transformers import TransformersModel
from runs.families.compare import compare
from runs.families.models import compile_model, optimize

# How the engine runs them: its own implementation, if it has one, and transformers' code.
FAMILIES: dict[str, list[str]] = {
    "bamba": ["Cached"],  # state-space layers and attention
    "bloom": ["Cached"],  # biases by distance
    "cohere": ["Packed"],
    "cpmant": ["Recomputed"],  # not causal
    "deepseek_v2": ["Packed"],  # latent attention
    "deepseek_v3": ["native", "Packed"],
    "deepseek_v32": ["Cached"],  # sparse attention
    "falcon": ["Cached"],  # one key head, attention of its own
    "gemma2": ["Packed"],  # soft caps, sliding windows
    "gemma3_text": ["native", "Packed"],
    "glm4": ["Packed"],
    "gpt2": ["Packed"],
    "gpt_neox": ["Packed"],
    "gpt_oss": ["Cached"],  # sinks
    "granite": ["Packed"],
    "jamba": ["Cached"],
    "lfm2": ["Cached"],  # short convolutions
    "llama": ["native", "Packed"],
    "mamba": ["Cached"],
    "mixtral": ["native", "Packed"],
    "mpt": ["Cached"],
    "nemotron_h": ["Recomputed"],  # its cache gives other logits
    "olmo2": ["Packed"],
    "opt": ["Packed"],
    "phi3": ["Packed"],
    "qwen2_moe": ["Packed"],
    "qwen3_next": ["Cached"],  # linear attention, mixture of experts
    "rwkv": ["Cached"],
    "stablelm": ["Packed"],
    "xlnet": ["Recomputed"],  # its configuration does not limit positions
}


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    results = compare(name)
    assert [(each.ran, each.status) for each in results] == [
        (ran, "equal") for ran in FAMILIES[name]
    ], results


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = TransformersModel.compute_logits
    monkeypatch.setattr(
        TransformersModel, "compute_logits", lambda self, hidden: 1.01 * logits(self, hidden)
    )
    (result,) = compare("gpt2")
    assert result.status == "different"
    assert "1 tokens together: log-probabilities differ by" in result.detail


@pytest.mark.parametrize("name", ["bamba", "gemma2", "gpt2", "qwen2_moe", "rwkv"])
def test_optimized_logits_are_those_of_transformers(name: str) -> None:
    (result,) = optimize(name)
    assert result.status == "equal", result


def test_compiled_logits_are_those_of_transformers() -> None:
    (result,) = compile_model("llama")
    assert result.status == "equal", result


def test_a_difference_of_optimized_logits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = SimpleNamespace(linear=lambda x, weight, bias: 1.1 * functional.linear(x, weight, bias))
    monkeypatch.setattr("opweave.optimization.linears.ir", SimpleNamespace(ops=ops))
    monkeypatch.setattr("opweave.optimization.model.difference", lambda *_: "")
    (result,) = optimize("llama")
    assert result.status == "different"
    assert "logits differ by" in result.detail

"""Representative architectures of transformers in the engine; ``make test-families`` has all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.nn import functional

from opweave_engine.transformers.model import TransformersModel
from runs.families.compare import compare
from runs.families.models import compile_model, optimize

# How the engine runs them: its own implementation, if it has one, and transformers' code.
FAMILIES: dict[str, str] = {
    "bamba": "Cached",  # state-space layers and attention
    "bloom": "Cached",  # biases by distance
    "cpmant": "Recomputed",  # not causal
    "deepseek_v2": "Packed",  # latent attention
    "deepseek_v3": "native Packed",
    "deepseek_v32": "Cached",  # sparse attention
    "falcon": "Cached",  # one key head, attention of its own
    "gemma2": "Packed",  # soft caps, sliding windows
    "gpt_oss": "Cached",  # sinks
    "lfm2": "Cached",  # short convolutions
    "nemotron_h": "Recomputed",  # its cache gives other logits
    "qwen3_next": "Cached",  # linear attention, mixture of experts
    "rwkv": "Cached",
    "xlnet": "Recomputed",  # its configuration does not limit positions
}
# These run in ways that a family above has.
ALIKE: dict[str, str] = {
    **dict.fromkeys(("cohere", "glm4", "gpt2", "gpt_neox", "granite", "olmo2", "opt"), "Packed"),
    **dict.fromkeys(("phi3", "qwen2_moe", "stablelm"), "Packed"),
    **dict.fromkeys(("gemma3_text", "llama", "mixtral"), "native Packed"),
    **dict.fromkeys(("jamba", "mamba", "mpt"), "Cached"),
}


@pytest.mark.parametrize(
    ("name", "ran"),
    [*FAMILIES.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in ALIKE.items())],
)
def test_greedy_tokens_are_those_of_transformers(name: str, ran: str) -> None:
    results = compare(name)
    assert [(r.ran, r.status) for r in results] == [(kind, "equal") for kind in ran.split()], (
        results
    )


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = TransformersModel.compute_logits
    monkeypatch.setattr(
        TransformersModel, "compute_logits", lambda self, hidden: 1.01 * logits(self, hidden)
    )
    (result,) = compare("gpt2")
    assert result.status == "different"
    assert "1 tokens together: log-probabilities differ by" in result.detail


@pytest.mark.parametrize("name", ["bamba", "gemma2", "qwen2_moe"])
def test_optimized_logits_are_those_of_transformers(name: str) -> None:
    (result,) = optimize(name)
    assert result.status == "equal", result


def test_compiled_logits_are_those_of_transformers() -> None:
    (result,) = compile_model("llama")
    assert result.status == "equal", result


def test_a_difference_of_optimized_logits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = SimpleNamespace(linear=lambda x, weight, bias: 1.1 * functional.linear(x, weight, bias))
    monkeypatch.setattr("opweave.optimization.linears.ir", SimpleNamespace(ops=ops))
    monkeypatch.setattr("opweave.optimization.replacement.difference", lambda *_: "")
    (result,) = optimize("llama")
    assert result.status == "different"
    assert "logits differ by" in result.detail

"""``torch.compile(model, backend="opweave")`` of unmodified models of transformers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import opweave.compile
from opweave.compile.report import Report

from .test_optimize import make

IDS = torch.tensor([[5, 17, 3, 88, 41, 9]])
# The ops of two layers and the head.
LAYERS: dict[str, dict[str, int]] = {
    "Llama": {"linear": 15, "rms_norm": 5},
    "Qwen2": {"linear": 15, "rms_norm": 5},
    "Qwen3": {"linear": 15, "rms_norm": 9},
    "Gemma": {"linear": 15, "rms_norm": 5},
    "Gemma2": {"linear": 15, "rms_norm": 9},
    "Olmo2": {"linear": 15, "rms_norm": 9},
    "Phi3": {"linear": 9, "rms_norm": 5, "silu_and_mul": 2},
    "GPTNeoX": {"linear": 9, "layer_norm": 5},
    "OPT": {"linear": 13, "layer_norm": 5},
    "Bert": {"linear": 13, "layer_norm": 5},
}
# Their norms are those of Llama, Gemma 2 and GPT-NeoX.
SPELLED_LIKE_OTHERS = ("Qwen2", "Gemma", "OPT")


def first_output(model: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS, use_cache=False, return_dict=True, **options)[0]
    return found


def compiled(model: Any, **options: Any) -> tuple[torch.Tensor, Report]:
    torch.compiler.reset()
    run = torch.compile(model, backend="opweave", options=options)
    return first_output(run), opweave.compile.report()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow) if f in SPELLED_LIKE_OTHERS else f for f in LAYERS],
)
def test_the_ops_of_a_model_are_recognized(family: str, dtype: torch.dtype) -> None:
    model = make(family, dtype)
    expected = first_output(model)
    found, report = compiled(model, codegen=False)
    assert Counter(each.op for each in report.recognized) == LAYERS[family]
    bound = 4e-2 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(found, expected, atol=bound * expected.abs().max(), rtol=bound)
    for each in report.recognized:
        assert "transformers" in each.source or "torch" in each.source, each.source


@pytest.mark.slow
def test_generated_code_calls_the_linear_kernels() -> None:
    model = make("Llama", torch.bfloat16)
    expected = first_output(model)
    found, report = compiled(model)
    assert Counter(each.op for each in report.recognized) == {"linear": 15}
    torch.testing.assert_close(found, expected, atol=4e-2 * expected.abs().max(), rtol=4e-2)


@pytest.mark.slow
def test_training_is_left_alone() -> None:
    model = make("Llama")
    torch.compiler.reset()
    run = torch.compile(model, backend="opweave")
    run(IDS, labels=IDS).loss.backward()
    report = opweave.compile.report()
    assert report.recognitions == []
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    for ours, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, atol=1e-5, rtol=1e-4)

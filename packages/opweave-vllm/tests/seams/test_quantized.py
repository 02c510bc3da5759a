"""Unpatched vLLM loads what ``opweave quantize`` writes."""

from pathlib import Path

import pytest
import torch
from greedy import PROMPTS
from test_greedy import CONFIGS, run
from torch import Tensor
from transformers import AutoModelForCausalLM

from opweave_engine import load_model
from opweave_engine.load.writer import quantize_checkpoint

# Differences of logits that rounding to bfloat16 explains; they are about 10 in size.
NEAR = 0.25


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "llama"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def of_vllm(path: Path) -> list[list[int]]:
    """Return vLLM's greedy tokens, without opweave's kernels."""
    options = {"dtype": "bfloat16", "enforce_eager": True}
    tokens: list[list[int]] = run(path.parent, "none", options, [path.name])["tokens"][0]
    return tokens


def logits_of(
    path: Path, prompts: list[list[int]], tokens: list[list[int]], dtype: str
) -> list[Tensor]:
    """Return opweave's logits for each of the *tokens* that follow a prompt, in float32."""
    model, result = load_model(path, dtype=dtype), []
    for prompt, found in zip(prompts, tokens, strict=True):
        ids = torch.tensor([*prompt, *found[:-1]])
        with torch.inference_mode():
            logits = model.compute_logits(model(ids, torch.arange(len(ids))))
        result.append(logits[len(prompt) - 1 :].float())
    return result


def assert_greedy(path: Path, tokens: list[list[int]]) -> None:
    """Assert that each of *tokens* has opweave's largest logit, but for rounding."""
    exact = total = 0
    given_logits = logits_of(path, PROMPTS, tokens, "bfloat16")
    for logits, found in zip(given_logits, tokens, strict=True):
        largest, best = logits.max(1)
        given = logits.gather(1, torch.tensor(found)[:, None])[:, 0]
        assert (largest - given).max() < NEAR
        exact, total = exact + int((best == torch.tensor(found)).sum()), total + len(found)
    assert exact >= 0.9 * total


@pytest.mark.parametrize("group", [32, 64, 128])
def test_vllm_loads_what_opweave_writes(group: int, plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "int4"
    quantize_checkpoint(plain, path, group=group)
    tokens = of_vllm(path)
    assert_greedy(path, tokens)
    with pytest.raises(AssertionError):  # or the comparison would prove nothing
        assert_greedy(plain, tokens)

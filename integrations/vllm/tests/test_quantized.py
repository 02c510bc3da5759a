"""Unpatched vLLM loads what ``opweave quantize`` writes."""

from pathlib import Path

import pytest
import torch
from greedy import PROMPTS
from test_greedy import CONFIGS, run
from transformers import AutoModelForCausalLM

from opweave.engine import load_model
from opweave.engine.loading.quantized.writer import quantize_checkpoint

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


def assert_greedy(path: Path, tokens: list[list[int]]) -> None:
    """Assert that each of *tokens* has opweave's largest logit, but for rounding."""
    model = load_model(path, dtype="bfloat16")
    exact = total = 0
    for prompt, found in zip(PROMPTS, tokens, strict=True):
        ids = torch.tensor([*prompt, *found[:-1]])
        with torch.inference_mode():
            logits = model.compute_logits(model(ids, torch.arange(len(ids))))
        logits = logits[len(prompt) - 1 :].float()
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

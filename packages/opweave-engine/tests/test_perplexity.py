"""The small checkpoint's perplexity: a check on kernels that reads real text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from opweave import ir
from opweave_engine import load_model
from opweave_engine.models import LlamaForCausalLM
from support import ROOT

CHECKPOINT = ROOT / "examples" / "models" / "tiny-pydoc"
RECORDED = json.loads((CHECKPOINT / "heldout.json").read_text(encoding="utf-8"))
ALLOWED = 0.005  # the recorded perplexity may move by this share
USED = ("causal_attention", "embedding", "fused_add_rms_norm", "linear", "rms_norm",
        "rotary_embedding", "silu_and_mul")  # fmt: skip
FORCED = [
    (op, impl.provider)
    for op in USED
    for impl in getattr(ir.ops, op).impls.values()
    if impl.supported
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return load_model(CHECKPOINT, dtype="float32")


@pytest.fixture(scope="module")
def windows() -> Tensor:
    """``(windows, 256)``: <s>, then 255 tokens of the held-out text."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    text = (CHECKPOINT / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    size = RECORDED["window"] - 1
    count = len(ids) // size
    bos = torch.full((count, 1), tokenizer.token_to_id("<s>"))
    return torch.cat((bos, torch.tensor(ids[: count * size]).view(count, size)), 1)


@pytest.fixture(scope="module")
def expected(model: LlamaForCausalLM, windows: Tensor) -> float:
    """The perplexity of few windows, since one provider works row by row."""
    with ir.record() as record:
        perplexity = math.exp(mean_loss(model, windows[:4]))
    assert tuple(sorted(record.selected_impls)) == USED
    return perplexity


def mean_loss(model: LlamaForCausalLM, windows: Tensor) -> float:
    """Return the mean negative log likelihood of every token but the first of each window."""
    return sum(losses(model, windows)) / len(windows)


@torch.inference_mode()
def losses(model: LlamaForCausalLM, windows: Tensor) -> Iterator[float]:
    positions = torch.arange(windows.shape[1])
    for window in windows:
        logits = model.compute_logits(model(window, positions))
        yield torch.nn.functional.cross_entropy(logits[:-1].float(), window[1:]).item()


def test_recorded_perplexity(model: LlamaForCausalLM, windows: Tensor) -> None:
    assert windows[:, 1:].numel() == RECORDED["tokens"]
    perplexity = math.exp(mean_loss(model, windows))
    assert perplexity == pytest.approx(RECORDED["perplexity"], rel=ALLOWED)


@pytest.mark.parametrize(("op", "provider"), FORCED)
def test_no_provider_moves_it(
    model: LlamaForCausalLM, windows: Tensor, expected: float, op: str, provider: str
) -> None:
    with ir.priority({op: [f"{provider}!"]}), ir.record() as record:
        found = math.exp(mean_loss(model, windows[:4]))
    assert list(record.selected_impls[op]) == [provider]
    assert found == pytest.approx(expected, rel=ALLOWED)


def test_bfloat16_moves_it_little(model: LlamaForCausalLM, windows: Tensor) -> None:
    few = windows[:16]
    expected = math.exp(mean_loss(model, few))
    found = math.exp(mean_loss(load_model(CHECKPOINT, dtype="bfloat16"), few))
    assert found == pytest.approx(expected, rel=0.02)  # of the rounding of activations


def test_a_wrong_kernel_is_caught(
    model: LlamaForCausalLM, windows: Tensor, expected: float
) -> None:
    from opweave.ir.testing import restored

    with restored(ir.ops.rms_norm):

        @ir.ops.rms_norm.register_impl("wrong")
        def wrong(
            x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
        ) -> Tensor:
            y = ir.ops.rms_norm.native(x, weight, epsilon, variance_size).clone()
            y[..., -1] = 0  # forgets the last column
            return y

        with ir.priority(rms_norm=["wrong"], fused_add_rms_norm=["native"]):
            found = math.exp(mean_loss(model, windows[:4]))
    assert found != pytest.approx(expected, rel=ALLOWED)

"""SmolLM2-135M-Instruct from its GGUF file: transformers' logits, tokens and perplexity."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from opweave import ir
from opweave_engine import LLM, SamplingParams, load_model
from support import ROOT
from weights.trained_models import smollm2, smollm2_gguf

TEXT = ROOT / "examples" / "models" / "tiny-pydoc" / "heldout.txt"
WINDOW = 256
TEXTS = [
    "The capital of France is",
    "Größe, naïve façade — 東京: 😀👩‍👩‍👧\u00a0\u2003",
    "  two  spaces\n\n\ttab\r\n",
    "12345 6,789.01 I'm sure they'LL",
    "<|im_start|>user\nHello<|im_end|>\n",
    "",
]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(smollm2_gguf(), dtype="float32")


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' model with the dequantized weights."""
    return AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def windows(llm: LLM) -> Tensor:
    ids = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    return torch.tensor(ids[: 2 * WINDOW]).view(2, WINDOW)


@pytest.mark.slow
def test_logits_and_perplexity(theirs: Any, windows: Tensor) -> None:
    model, losses = load_model(smollm2_gguf(), dtype="float32"), torch.zeros(2)
    for window in windows:
        with torch.inference_mode():
            expected = theirs(window[None]).logits[0]
            found = model.compute_logits(model(window, torch.arange(WINDOW)))
        assert (found - expected).norm() <= 1e-2 * expected.norm()
        for i, logits in enumerate((found, expected)):
            losses[i] += torch.nn.functional.cross_entropy(logits[:-1], window[1:])
    ours, reference = (math.exp(loss / len(windows)) for loss in losses.tolist())
    assert abs(ours / reference - 1) < 0.005
    assert 5 < reference < 100  # it is a language model


def test_perplexity_with_activations_of_8_bits(
    windows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens by the kernel for few of them, as if they were decoded one by one."""
    monkeypatch.setattr("opweave.kernels.opweave_c_int8._MAX_TOKENS_Q", {torch.bfloat16: WINDOW})
    model, losses, logits = load_model(smollm2_gguf(), dtype="bfloat16"), [], []
    for provider in ("opweave_c", "opweave_c_int8"):
        with torch.inference_mode(), ir.priority(linear_q=[f"{provider}!"]):
            found = [model.compute_logits(model(w, torch.arange(WINDOW))) for w in windows]
        logits.append(torch.stack(found))
        predicted = logits[-1][:, :-1].flatten(0, 1)
        losses.append(torch.nn.functional.cross_entropy(predicted, windows[:, 1:].flatten()))
    exact, rounded = logits
    assert 0 < (rounded - exact).norm() <= 4e-2 * exact.norm()
    assert abs(math.exp(losses[1] - losses[0]) - 1) < 0.01


def test_tokens(llm: LLM) -> None:
    file = smollm2_gguf()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in TEXTS:
        ids = llm.tokenizer.encode(text)
        assert ids == tokenizer(text)["input_ids"]
        assert llm.tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids)
    rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    (output,) = llm.chat(CHAT, SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == rendered


def test_an_answer(llm: LLM) -> None:
    (output,) = llm.chat(CHAT, SamplingParams(max_tokens=16, temperature=0))
    answer = output.outputs[0]
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


def test_the_default_dtype() -> None:
    (output,) = LLM(smollm2_gguf()).generate(TEXTS[0], SamplingParams(max_tokens=4, temperature=0))
    assert output.outputs[0].text.startswith(" Paris")

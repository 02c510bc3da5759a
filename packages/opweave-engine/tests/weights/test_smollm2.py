"""SmolLM2-135M-Instruct in float32 writes the tokens that transformers writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from opweave_engine import LLM, SamplingParams, StructuredOutputsParams
from weights.trained_models import smollm2

PROMPTS = ["The capital of France is", "Größe, naïve façade — 東京:", "one two three " * 40]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Is ice cold?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Is fire cold?"},
    ],
]
COUNT = 12
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0)


@pytest.fixture(scope="module")
def path() -> Path:
    return smollm2()


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path)


@pytest.fixture(scope="module")
def theirs(path: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(path), model.eval()


def continued(model: Any, ids: list[int]) -> list[int]:
    """Return what transformers writes after *ids*, greedily."""
    found = model.generate(torch.tensor([ids]), max_new_tokens=COUNT, do_sample=False)
    tokens: list[int] = found[0, len(ids) :].tolist()
    return tokens


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_after_a_prompt(prompt: str, llm: LLM, theirs: tuple[Any, Any]) -> None:
    tokenizer, model = theirs
    (output,) = llm.generate(prompt, GREEDY)
    assert output.prompt_token_ids == tokenizer(prompt)["input_ids"]
    tokens = output.outputs[0].token_ids
    assert tokens == continued(model, output.prompt_token_ids)
    assert output.outputs[0].text == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("messages", CHATS)
def test_tokens_of_an_answer(
    messages: list[dict[str, str]], llm: LLM, theirs: tuple[Any, Any]
) -> None:
    tokenizer, model = theirs
    (output,) = llm.chat(messages, GREEDY)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert output.prompt_token_ids == ids
    assert output.outputs[0].token_ids == continued(model, ids)


def test_tokens_that_continue_an_answer(llm: LLM, theirs: tuple[Any, Any]) -> None:
    tokenizer, model = theirs
    messages = [*CHATS[0], {"role": "assistant", "content": "The capital of France is"}]
    (output,) = llm.chat(messages, GREEDY, continue_final_message=True)
    ids = tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    assert output.prompt_token_ids == ids
    assert output.outputs[0].token_ids == continued(model, ids)
    assert output.outputs[0].text.startswith(" Paris")


def test_answers_have_the_form_that_is_asked_for(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "country": {"enum": ["Italy", "France"]}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    form = StructuredOutputsParams(json=schema)
    params = SamplingParams(max_tokens=60, temperature=0, structured_outputs=form)
    question = "Name a large city in France and its country, as JSON."
    (output,) = llm.chat([{"role": "user", "content": question}], params)
    (answer,) = output.outputs
    assert answer.finish_reason == "stop"
    found = json.loads(answer.text)
    jsonschema.validate(found, schema)
    assert found["country"] == "France"
    choice = StructuredOutputsParams(choice=[" Berlin", " Rome", " Paris"])
    params = SamplingParams(temperature=0, structured_outputs=choice)
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].text == " Paris"

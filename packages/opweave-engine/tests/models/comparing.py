"""Compares a checkpoint in opweave with the same checkpoint in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.tiny_checkpoints import SIZES as TINY
from models.tiny_checkpoints import random_ids, randomized
from opweave_engine import LLM, SamplingParams

LENGTHS = (1, 9, 70, 300)
COUNT = 8  # tokens that are written after each prompt
SIZES = {**TINY, "max_position_embeddings": 512}


def write(
    path: Path,
    model_type: str,
    changes: Mapping[str, Any],
    config_json: Mapping[str, Any] | Callable[[dict[str, Any]], None] | None = None,
    **saving: Any,
) -> Path:
    """Save a random model of transformers.

    Args:
        path: where.
        model_type: what transformers calls its kind.
        changes: what differs from SIZES.
        config_json: what is changed in the file afterwards, so that it is read as it is written.
        saving: options of ``save_pretrained``.
    """
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    torch.manual_seed(sum(map(ord, str(changes) + model_type)))
    randomized(AutoModelForCausalLM.from_config(config)).save_pretrained(path, **saving)
    file = path / "config.json"
    values = json.loads(file.read_text())
    if callable(config_json):
        config_json(values)
    else:
        values.update(config_json or {})
    file.write_text(json.dumps(values))
    return path


def check_as_transformers(path: Path, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Compare the tokens of greedy decoding, and the log-probabilities of all tokens."""
    reference = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    llm = LLM(path, dtype="float32")
    prompts = [random_ids(length, length) for length in lengths]
    params = SamplingParams(
        max_tokens=COUNT, temperature=0, logprobs=5, prompt_logprobs=0, ignore_eos=True
    )
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        (answer,) = output.outputs
        ids = prompt + answer.token_ids
        with torch.inference_mode():
            scores = reference(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        written = scores[len(prompt) - 1 : -1]
        assert answer.token_ids == written.argmax(-1).tolist()
        for row, found in zip(written, answer.logprobs, strict=True):
            for token, each in found.items():
                assert abs(each.logprob - row[token].item()) < 2e-4
        for place, given in enumerate(output.prompt_logprobs[1:]):
            wanted = scores[place, prompt[place + 1]].item()
            assert abs(given[prompt[place + 1]].logprob - wanted) < 2e-4
    llm.shutdown()

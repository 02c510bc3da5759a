"""transformers as a worker: see serving.py.

One request runs ``generate``; several run continuous batching. The argument is a JSON object:
``model``, ``dtype`` and the tokens of a ``batch``.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import torch
import transformers
from serving import Tokens, serve, take_stdout
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

_CACHE_BLOCKS = 256  # room for all requests of a load


class Engine:
    """A model with its two ways to generate."""

    def __init__(self, model: str, dtype: str, batch: int) -> None:
        self._path, self._dtype, self._batch = model, getattr(torch, dtype), batch
        self._model = self._load()
        self._manager: Any = None

    def generate(self, prompts: Tokens, counts: list[int]) -> Tokens:
        return (
            self._single(prompts[0], counts[0])
            if len(prompts) == 1
            else self._many(prompts, counts)
        )

    def _load(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._path, dtype=self._dtype).eval()

    def _single(self, prompt: list[int], count: int) -> Tokens:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            done = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=_greedy(count)
            )
        return [done[0, len(prompt) :].tolist()]

    def _many(self, prompts: Tokens, counts: list[int]) -> Tokens:
        if self._manager is None:
            # A model of its own, because continuous batching replaces the attention.
            self._manager = self._load().init_continuous_batching(
                _greedy(max(counts)),
                ContinuousBatchingConfig(num_blocks=_CACHE_BLOCKS, max_batch_tokens=self._batch),
            )
            self._manager.start()
        names = [
            self._manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1)
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("continuous batching has stopped")
            if result is not None and result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result.error}")
            if result is not None and result.is_finished():
                answers[result.request_id] = result.generated_tokens
        return [answers[name] for name in names]

    def stop(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True)


def _greedy(count: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)


def main(options: dict[str, Any]) -> None:
    answers = take_stdout()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    engine = Engine(options["model"], options["dtype"], options["batch"])
    try:
        serve(answers, f"transformers {transformers.__version__}", engine.generate)
    finally:
        engine.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

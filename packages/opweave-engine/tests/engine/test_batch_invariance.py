"""Batch-invariant mode: the bits of a token do not depend on the rest of the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.test_equality import GREEDY, PROMPTS, config
from models.tiny_checkpoints import Checkpoints
from opweave import ir
from opweave_engine import LLM


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("llama", "float16"),
        ("gemma3", "float32"),
        ("deepseek", "float32"),
    ],
)
def test_a_token_has_the_same_bits_in_any_batch(
    kind: str, dtype: str, checkpoint: Checkpoints
) -> None:
    """Chunks, steps, and prefixes that are recomputed or found give a token the same bits."""
    path, params = checkpoint(kind)[0], replace(GREEDY, logprobs=1)

    def scores(*batches: list[list[int]], **options: Any) -> list[Any]:
        llm = LLM(path, dtype=dtype, config=config(**options))
        answers = [answer for batch in batches for answer in llm.generate(batch, params)]
        return [answer.outputs[0].logprobs for answer in answers]

    with ir.require("batch_invariant"):
        alone = scores(*([prompt] for prompt in PROMPTS), prefix=False)
        assert scores(PROMPTS) == alone
        assert scores(PROMPTS, max_num_seqs=3, max_num_batched_tokens=5) == alone
        assert scores(PROMPTS, blocks=4, prefix=False) == alone

"""Models of transformers on two tensor-parallel processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hugging_face.transformers_checkpoints import VOCABULARY, write_checkpoint
from models.running import assert_near
from models.test_two_ranks import Case, Outcomes, run

TOKENS = 19
HEADS = {"head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 1.0},
    "deepseek_v2": {
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "gemma2": {**HEADS, "sliding_window": 8},
    "glm4": HEADS,  # the MLP's halves are gathered
    "gpt_neox": {},  # biases
    "olmo2": {},  # norms over all heads
    "phi3": {},  # one projection for queries, keys and values
    "smollm3": {},
    "starcoder2": {"use_bias": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The results of every family; two processes run them all."""
    cases = {}
    ids = torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(5))
    for name, fields in FAMILIES.items():
        path = tmp_path_factory.mktemp(name)
        model = write_checkpoint(path, name, fields)
        with torch.inference_mode():
            wanted = model(input_ids=ids[None], use_cache=False).logits[0]
        given = {"ids": ids, "positions": torch.arange(TOKENS)}
        cases[name] = Case(path, given, wanted, model_impl="transformers")
    return run(cases, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_one_process(name: str, outcomes: Outcomes) -> None:
    outcome = outcomes[name]
    assert outcome.wanted.std() > 0.1  # a comparison of zeros would prove nothing
    for result in outcome.results:
        assert_near(result, outcome.wanted)


def test_each_process_has_a_part(outcomes: Outcomes) -> None:
    embeddings = 2 * VOCABULARY * 64
    whole = embeddings + 2 * (4 * 64 * 64 - 2 * 64 * 32 + 3 * 64 * 96)
    for size in outcomes["smollm3"].sizes:
        assert size < 0.9 * whole

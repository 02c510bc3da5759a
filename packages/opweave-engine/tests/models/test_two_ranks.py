"""Models give transformers' results on two tensor-parallel processes, eager and compiled.

test_language_models.py runs every model on two ranks in threads.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hugging_face.transformers_checkpoints import VOCABULARY, write_checkpoint
from models.running import assert_near, expected
from models.tiny_checkpoints import Checkpoints, random_ids
from models.two_ranks import RANKS
from opweave.config.engine import ModelImpl
from support.warm_python import warm_python

TOKENS = 17  # more than the sliding windows


class Case(NamedTuple):
    """The inputs of a model in a directory, and the results of transformers."""

    path: Path
    given: dict[str, Tensor]
    wanted: Tensor
    compiles: bool = False
    model_impl: ModelImpl = "auto"


class Outcome(NamedTuple):
    """The results of transformers and of each rank for a case, and the size of each shard."""

    wanted: Tensor
    results: list[Tensor]
    sizes: list[int]


Outcomes = dict[str, Outcome]


def language_model(built: tuple[Path, Any]) -> Case:
    path, reference = built
    ids = torch.tensor(random_ids(11, TOKENS))
    given = {"ids": ids, "positions": torch.arange(TOKENS)}
    return Case(path, given, expected(reference, ids), compiles=True)


def run(cases: dict[str, Case], folder: Path, *, codegen: bool = False) -> Outcomes:
    """Run all *cases* in two processes."""
    fields = ("given", "compiles", "model_impl")
    described = {
        name: {"path": str(case.path), **{field: getattr(case, field) for field in fields}}
        for name, case in cases.items()
    }
    torch.save(described, folder / "cases.pt")
    code = "import transformers.modeling_utils\n"  # before it forks, for both ranks
    code += f"from models.two_ranks import run_ranks; run_ranks({str(folder)!r}, {codegen})"
    paths = os.pathsep.join(filter(None, sys.path))
    ended = warm_python().run("-c", code, env={**os.environ, "PYTHONPATH": paths})
    assert ended.returncode == 0, ended.stderr
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
    return {
        name: Outcome(
            case.wanted,
            [results[name]["result"] for results in ranks],
            [int(results[name]["numel"]) for results in ranks],
        )
        for name, case in cases.items()
    }


def check(outcome: Outcome) -> None:
    assert outcome.wanted.std() > 0.1  # a comparison of zeros would prove nothing
    for result in outcome.results:
        assert_near(result, outcome.wanted)


@pytest.mark.slow
@pytest.mark.parametrize("codegen", [False, True])
def test_compiled_models(codegen: bool, checkpoint: Checkpoints, tmp_path: Path) -> None:
    with torch.inference_mode():
        kinds = ("one_layer", "mixtral_one_layer")
        cases = {kind: language_model(checkpoint(kind)) for kind in kinds}
    for outcome in run(cases, tmp_path, codegen=codegen).values():
        check(outcome)


# Models of transformers on two tensor-parallel processes


LENGTH = 19
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
    ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(5))
    for name, fields in FAMILIES.items():
        path = tmp_path_factory.mktemp(name)
        model = write_checkpoint(path, name, fields)
        with torch.inference_mode():
            wanted = model(input_ids=ids[None], use_cache=False).logits[0]
        given = {"ids": ids, "positions": torch.arange(LENGTH)}
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

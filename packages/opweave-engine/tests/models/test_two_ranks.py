"""Models give transformers' results on two tensor-parallel processes, eager and compiled.

test_language_models.py runs every model on two ranks in threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, multiprocessing

from models.layer_checkpoints import gpt_oss_block
from models.running import assert_near, expected
from models.tiny_checkpoints import random_ids
from models.two_ranks import RANKS, run_rank
from opweave.config.engine import ModelImpl

Checkpoints = Callable[[str], tuple[Path, Any]]
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


def language_model(built: tuple[Path, Any], *, compiles: bool = False) -> Case:
    path, reference = built
    ids = torch.tensor(random_ids(11, TOKENS))
    given = {"ids": ids, "positions": torch.arange(TOKENS)}
    return Case(path, given, expected(reference, ids), compiles)


def gpt_oss(path: Path) -> Case:
    config, block = gpt_oss_block()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.save(block.state_dict(), path / "block.pt")
    hidden = torch.randn(TOKENS, config["hidden_size"])
    return Case(path, {"hidden": hidden}, block(hidden[None])[0][0])


def run(cases: dict[str, Case], folder: Path, *, codegen: bool = False) -> Outcomes:
    """Run all *cases* in two processes."""
    described = {
        name: {
            "path": str(case.path),
            "given": case.given,
            "compiles": case.compiles,
            "model_impl": case.model_impl,
        }
        for name, case in cases.items()
    }
    torch.save(described, folder / "cases.pt")
    spawn: Any = multiprocessing.spawn  # type: ignore[attr-defined]
    spawn(run_rank, (folder, codegen), nprocs=RANKS)
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
    return {
        name: Outcome(
            case.wanted,
            [results[name]["result"] for results in ranks],
            [int(results[name]["numel"]) for results in ranks],
        )
        for name, case in cases.items()
    }


@pytest.fixture(scope="module")
def outcomes(
    checkpoint: Checkpoints,
    layer_checkpoint: Checkpoints,
    tmp_path_factory: pytest.TempPathFactory,
) -> Outcomes:
    """The results of every model; two processes run them all."""
    with torch.inference_mode():
        cases = {
            "llama": language_model(checkpoint("llama")),
            "qwen3_moe": language_model(layer_checkpoint("qwen3_moe")),
        }
        cases["gpt_oss"] = gpt_oss(tmp_path_factory.mktemp("gpt_oss"))
    return run(cases, tmp_path_factory.mktemp("two_ranks"))


def check(outcome: Outcome) -> None:
    assert outcome.wanted.std() > 0.1  # a comparison of zeros would prove nothing
    for result in outcome.results:
        assert_near(result, outcome.wanted)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
def test_two_processes_give_the_results_of_transformers(kind: str, outcomes: Outcomes) -> None:
    check(outcomes[kind])


def test_each_process_has_a_part(outcomes: Outcomes, checkpoint: Checkpoints) -> None:
    whole = sum(p.numel() for p in checkpoint("llama")[1].parameters())
    for size in outcomes["llama"].sizes:
        assert whole / 2 < size < 0.52 * whole  # norms are on every rank


@pytest.mark.slow
@pytest.mark.parametrize("codegen", [False, True])
def test_compiled_models(
    codegen: bool, checkpoint: Checkpoints, layer_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    with torch.inference_mode():
        cases = {
            kind: language_model(built(kind), compiles=True)
            for kind, built in (("one_layer", checkpoint), ("mixtral_one_layer", layer_checkpoint))
        }
    for outcome in run(cases, tmp_path, codegen=codegen).values():
        check(outcome)

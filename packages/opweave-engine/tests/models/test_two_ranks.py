"""Every model gives transformers' results on two tensor-parallel processes, eager and compiled."""

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
from opweave_engine.models import PatchGrid

Checkpoints = Callable[[str], tuple[Path, Any]]
LLAMA = ("llama", "biases", "mistral", "qwen2", "qwen3")  # of the one fixture, the others
LANGUAGE = ("mixtral", "qwen3_moe", "deepseek", "gemma3", "mamba2")  # of the other
COMPILED = ("one_layer", "mixtral_one_layer")
TOKENS = 17  # more than the sliding windows
SIZES = [(1, 4, 6), (2, 2, 4)]  # images, in patches


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


def bert(built: tuple[Path, Any]) -> Case:
    path, reference = built
    ids = torch.tensor(random_ids(12, TOKENS))
    hidden = reference(input_ids=ids[None]).last_hidden_state[0]
    return Case(path, {"ids": ids, "positions": torch.arange(TOKENS)}, hidden)


def vision(built: tuple[Path, Any]) -> Case:
    path, reference = built
    grid = PatchGrid.of(SIZES, 2)
    pixels = torch.randn(len(grid.positions), 3 * 2 * 4 * 4)
    merged = reference(pixels, torch.tensor(SIZES)).pooler_output
    return Case(path, {"pixels": pixels, **grid._asdict()}, merged)


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
        cases = {kind: language_model(checkpoint(kind)) for kind in LLAMA}
        cases |= {kind: language_model(layer_checkpoint(kind)) for kind in LANGUAGE}
        cases["bert"] = bert(layer_checkpoint("bert"))
        cases["qwen2_vision"] = vision(layer_checkpoint("qwen2_vision"))
        cases["gpt_oss"] = gpt_oss(tmp_path_factory.mktemp("gpt_oss"))
        cases |= compiled_cases(checkpoint, layer_checkpoint)
    return run(cases, tmp_path_factory.mktemp("two_ranks"))


def compiled_cases(checkpoint: Checkpoints, layer_checkpoint: Checkpoints) -> dict[str, Case]:
    return {
        kind: language_model(built(kind), compiles=True)
        for kind, built in zip(COMPILED, (checkpoint, layer_checkpoint), strict=True)
    }


def check(outcome: Outcome) -> None:
    assert outcome.wanted.std() > 0.1  # a comparison of zeros would prove nothing
    for result in outcome.results:
        assert_near(result, outcome.wanted)


@pytest.mark.parametrize("kind", [*LLAMA, *LANGUAGE, "bert", "qwen2_vision", "gpt_oss", *COMPILED])
def test_two_processes_give_the_results_of_transformers(kind: str, outcomes: Outcomes) -> None:
    check(outcomes[kind])


def test_each_process_has_a_part(outcomes: Outcomes, checkpoint: Checkpoints) -> None:
    whole = sum(p.numel() for p in checkpoint("llama")[1].parameters())
    for size in outcomes["llama"].sizes:
        assert whole / 2 < size < 0.52 * whole  # norms are on every rank


@pytest.mark.slow
def test_code_is_generated_for_two_processes(
    checkpoint: Checkpoints, layer_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    with torch.inference_mode():
        cases = compiled_cases(checkpoint, layer_checkpoint)
    for outcome in run(cases, tmp_path, codegen=True).values():
        check(outcome)

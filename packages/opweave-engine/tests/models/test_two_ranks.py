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
    code = f"from models.two_ranks import run_ranks; run_ranks({str(folder)!r}, {codegen})"
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

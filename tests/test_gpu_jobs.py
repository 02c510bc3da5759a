"""The jobs for a GPU, tested on the CPU with small models."""

from __future__ import annotations

import inspect
import json
import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from support import ROOT

# Last: tests/runs/gpu.py is not benchmarks/gpu.py, nor benchmarks/engine.py the tests' engine.
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests" / "runs")]

from gpu_queue.bodies import conformance, generation, greedy, kernels, models, smoke
from gpu_queue.jobs import POINTWISE, STAGES, all_jobs


def test_bodies_take_the_arguments_of_their_jobs() -> None:
    stages = [stage.name for stage in STAGES]
    for device, size in (("cuda", "full"), ("cpu", "tiny")):
        jobs = all_jobs(device, size)
        assert len({each.name for each in jobs}) == len(jobs)
        for each in jobs:
            assert each.stage in stages
            assert each.name.startswith(f"{each.stage}/")
            assert 0 < each.expected <= each.limit
            module, _, function = each.body.partition(":")
            inspect.signature(getattr(import_module(module), function)).bind(**each.arguments)
            json.dumps(each.arguments)
    assert {each.stage for each in jobs} == set(stages)
    assert {each.arguments["op"] for each in jobs if each.stage == "smoke"} >= set(POINTWISE)


def rows(found: Any) -> list[dict[str, Any]]:
    listed = list(found)
    assert listed
    assert all({"name", "case"} <= row.keys() for row in listed)
    json.dumps(listed)
    return listed


def test_smoke_finds_what_is_right_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in ("rms_norm", "fused_add_rms_norm", "reshape_and_cache"):
        [row] = rows(smoke.run(op, "native", "cpu"))
        assert row["value"] > 0
        assert "problem" not in row
    [row] = rows(smoke.run("rms_norm", "triton", "cpu"))
    assert row["value"] == 0
    assert row["note"]
    subject_type = type(smoke.subject_of("relu2", "native", "cpu"))
    monkeypatch.setattr(subject_type, "run", lambda self, values: values[0] + 1)
    [row] = rows(smoke.run("relu2", "native", "cpu"))
    assert row["problem"].startswith("output 0: ")


def test_conformance_yields_cases_and_problems() -> None:
    [row] = rows(conformance.run("silu_and_mul", "batch_invariant", "cpu", checks=("values",)))
    assert row["value"] > 10
    assert row["name"] == "conformance"


def test_decoding_and_prompts_on_the_cpu() -> None:
    for contender in ("opweave", "transformers"):
        [row] = rows(generation.decode(contender, 2, "cpu", "tiny", tokens=4))
        assert row["contender"] == contender
        assert row["value"] > 0
        assert row["limit_share"] > 0
    [row] = rows(generation.prefill("opweave", 32, "cpu", "tiny"))
    assert row["value"] > 0


def test_transformers_decodes_the_same_with_a_static_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "DTYPE", torch.float32)  # no ties
    path = generation.write_config(tmp_path / "model", models.config_of("tiny"))
    answers = []
    for more in ({"compiled": False}, {"compiled": True, "backend": "aot_eager"}):
        torch.manual_seed(1)
        model = models.Transformers(path, 2, 7, 5, device="cpu", **more)
        for _ in range(2):  # the second time, the cache is used again
            random.seed(2)
            assert len(model.steps()) == 5
            answers.append(model.answers)
    assert [len(answer) for answer in answers[0]] == [5, 5]
    assert answers[1:] == answers[:1] * 3


@pytest.mark.slow
@pytest.mark.parametrize("contender", ["opweave-compiled", "transformers-compiled"])
def test_compiled_contenders_on_the_cpu(contender: str) -> None:
    [row] = rows(generation.decode(contender, 2, "cpu", "tiny", tokens=4))
    assert row["value"] > 0


def test_kernels_on_the_cpu() -> None:
    small: dict[str, Any] = {"device": "cpu", "provider": "native", "hidden": 256}
    more = {"backend": "eager", "copied": 2**16}
    for op, shapes in (("silu_and_mul", [(4, 0)]), ("paged_attention", [(2, 64)])):
        found = rows(kernels.cells(op, shapes, **small, **more))
        assert {"native", "eager", "inductor"} <= {row["contender"] for row in found}
    found = rows(kernels.host(POINTWISE[:2], **small))
    assert [row["contender"] for row in found] == ["native", "eager"] * 2
    found = rows(kernels.prompt_attention(64, **small))
    contenders = ["native", "opweave", "aten", "sdpa", "gather and sdpa"]
    assert [row["contender"] for row in found] == contenders


def test_greedy_answers_on_the_cpu(tmp_path: Path) -> None:
    [row] = rows(greedy.run("llama", 0, "cpu"))
    assert (row["value"], row["unit"]) == (3, "of 3 answers equal")
    assert "problem" not in row
    for family in greedy.FAMILIES:
        greedy.write_checkpoint(tmp_path / family, family)
        found = greedy.answers(tmp_path / family, 0)
        assert [len(answer) for answer in found] == [32, 32, 32]
        assert len({*found[0], *found[1], *found[2]}) > 5

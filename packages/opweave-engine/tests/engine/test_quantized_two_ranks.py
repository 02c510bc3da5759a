"""Quantized weights give transformers' results on two tensor-parallel processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine import gguf_files
from engine import quantized_checkpoints as q
from engine.test_quantized_activations import CASES as ACTIVATIONS
from engine.test_quantized_activations import assert_quantized, quantize_inputs
from engine.test_quantized_formats import CASES
from models import tiny_checkpoints
from models.test_two_ranks import Outcomes, check, language_model, run
from opweave.layers import ShardingError, TensorParallel, tensor_parallel
from opweave_engine import load_model

NAMES = ("gptq_asymmetric", "awq", "int4", "int8", "float8")


def gguf_kind(name: str) -> Kind:
    return Kind.Q8_0 if "v_proj" in name else Kind.Q4_0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    with torch.inference_mode():
        cases = {}
        for name in NAMES:
            path = tmp_path_factory.mktemp(name)
            config, packer = CASES[name]
            cases[name] = language_model((path, q.write(path, config, lambda _, p=packer: p)))
        path = tmp_path_factory.mktemp("blocks")
        config, packer, quantize = ACTIVATIONS["deepseek"]
        model = q.write(path, config, lambda _: packer)
        cases["weight_only"] = language_model((path, model))
        quantize_inputs(model, quantize)
        cases["blocks"] = language_model((path, model))
        model = tiny_checkpoints.hf_model("llama", **q.WIDE)
        file = tmp_path_factory.mktemp("gguf") / "model.gguf"
        gguf_files.write(file, model, gguf_kind)
        cases["gguf"] = language_model((file, model))
    return run(cases, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.parametrize("name", [*NAMES, "gguf"])
def test_two_processes_give_the_results_of_transformers(name: str, outcomes: Outcomes) -> None:
    check(outcomes[name])


def test_two_processes_quantize_the_same_groups(outcomes: Outcomes) -> None:
    wanted, weight_only = outcomes["blocks"].wanted, outcomes["weight_only"].wanted
    for result in outcomes["blocks"].results:
        assert_quantized(result, wanted, weight_only)


def load_first_of_two(path: Path) -> None:
    def unused(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        raise AssertionError("nothing is computed")

    with tensor_parallel(TensorParallel(0, 2, unused, unused)):
        load_model(path)


def test_reordered_inputs_cannot_be_divided(tmp_path: Path) -> None:
    config, packer = CASES["gptq_act_order"]
    q.write(tmp_path, config, lambda _: packer)
    with pytest.raises(
        ShardingError, match=r"layers.0.self_attn.o_proj: .*act-order.*Use one rank"
    ):
        load_first_of_two(tmp_path)


def test_groups_cannot_be_divided(tmp_path: Path) -> None:
    config, packer = CASES["gptq_whole_rows"]
    q.write(tmp_path, config, lambda _: packer)
    with pytest.raises(ShardingError, match=r"128 of 256 inputs are not a multiple of the group"):
        load_first_of_two(tmp_path)


def test_blocks_cannot_be_divided(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("llama", **q.WIDE)
    path = gguf_files.write(tmp_path / "model.gguf", model, lambda _: Kind.Q4_K)
    with pytest.raises(ShardingError, match=r"not a multiple of the block of 256"):
        load_first_of_two(path)

"""Quantized weights give transformers' results on two tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from engine import gguf_files
from engine import quantized_checkpoints as q
from engine.compared_logits import close, load_first_of_two, on_two_ranks, theirs
from engine.test_quantized_activations import CASES as ACTIVATIONS
from engine.test_quantized_activations import assert_quantized, quantize_inputs
from engine.test_quantized_formats import CASES
from models import tiny_checkpoints
from opweave.layers import ShardingError


@pytest.mark.parametrize("name", ["gptq_asymmetric", "awq", "int4", "int8", "float8"])
def test_formats(name: str, tmp_path: Path) -> None:
    config, packer = CASES[name]
    model = q.write(tmp_path, config, lambda _: packer)
    assert all(close(result, theirs(model)) for result in on_two_ranks(tmp_path))


def test_gguf(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("llama", **q.WIDE)
    path = gguf_files.write(
        tmp_path / "model.gguf", model, lambda n: Kind.Q8_0 if "v_proj" in n else Kind.Q4_0
    )
    assert all(close(result, theirs(model)) for result in on_two_ranks(path))


def test_ranks_quantize_the_same_groups(tmp_path: Path) -> None:
    config, packer, quantize = ACTIVATIONS["deepseek"]
    model = q.write(tmp_path, config, lambda _: packer)
    weight_only = theirs(model)
    quantize_inputs(model, quantize)
    for result in on_two_ranks(tmp_path):
        assert_quantized(result, theirs(model), weight_only)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gptq_act_order", r"layers.0.self_attn.o_proj: .*act-order.*Use one rank"),
        ("gptq_whole_rows", r"128 of 256 inputs are not a multiple of the group"),
    ],
)
def test_inputs_that_cannot_be_divided(name: str, message: str, tmp_path: Path) -> None:
    config, packer = CASES[name]
    q.write(tmp_path, config, lambda _: packer)
    with pytest.raises(ShardingError, match=message):
        load_first_of_two(tmp_path)


def test_blocks_cannot_be_divided(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("llama", **q.WIDE)
    path = gguf_files.write(tmp_path / "model.gguf", model, lambda _: Kind.Q4_K)
    with pytest.raises(ShardingError, match=r"not a multiple of the block of 256"):
        load_first_of_two(path)

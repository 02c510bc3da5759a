"""Experts of checkpoints stay quantized, and give the logits of transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from engine import gguf_files
from engine import quantized_checkpoints as q
from engine.compared_logits import (
    close,
    compiled_logits,
    load_first_of_two,
    logits,
    on_two_ranks,
    theirs,
)
from engine.test_quantized_activations import CASES as ACTIVATIONS
from engine.test_quantized_activations import Quantize, assert_quantized, quantize_inputs
from engine.test_quantized_formats import CASES
from engine.test_quantized_formats import CASES as WEIGHT_ONLY
from models import tiny_checkpoints
from opweave.layers import FusedMoE, ShardingError
from opweave_engine import load_model

SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
MIXTRAL = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 64}
DEEPSEEK = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128,
            "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64, "v_head_dim": 32}  # fmt: skip
KINDS = {"qwen3_moe": SIZES, "mixtral": MIXTRAL, "deepseek": DEEPSEEK}
FORMATS = ("gptq", "gptq_whole_rows", "awq", "int4", "int4_zeros", "int8", "float8")
NARROW = {torch.uint8, torch.int8, torch.float8_e4m3fn}


def write(path: Path, config: dict[str, Any], packer_of: Any, kind: str = "qwen3_moe") -> Any:
    """Write a checkpoint with quantized linear layers and experts; return transformers' model."""
    model = tiny_checkpoints.hf_model(kind, **KINDS[kind])
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    parts = ("proj.weight", "with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    for name in [name for name in tensors if name.endswith(parts)]:
        module, weight = name.removesuffix(".weight"), tensors[name]
        packer = packer_of(module)
        if packer is None:
            continue
        del tensors[name]
        packed, values = packer(weight.numpy())
        tensors |= {f"{module}.{leaf}": tensor.contiguous() for leaf, tensor in packed.items()}
        set_weight(model, name, torch.from_numpy(values).float())
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    tiny_checkpoints.edit_config(path, quantization_config=dict(config))
    return model


def set_weight(model: Any, name: str, values: Tensor) -> None:
    renamed = name.replace("block_sparse_moe", "mlp")
    for theirs_, ours in ((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")):
        renamed = renamed.replace(theirs_, ours)
    q.set_weight(model, renamed, values)


def experts(model: Any) -> list[FusedMoE]:
    return [module for module in model.modules() if isinstance(module, FusedMoE)]


def assert_narrow(path: Path) -> None:
    found = experts(load_model(path))
    assert found
    assert all({m.w13_weight.dtype, m.w2_weight.dtype} <= NARROW for m in found)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("name", FORMATS)
def test_weights(name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, packer = WEIGHT_ONLY[name]
    model = write(tmp_path, config, lambda _: packer, kind)
    assert close(logits(tmp_path), theirs(model))
    assert_narrow(tmp_path)
    assert "dequantized" not in caplog.text


def quantize_experts(model: nn.Module, quantize: Quantize) -> None:
    """Quantize the inputs of both products of every expert."""

    def forward_of(experts: Any) -> Any:
        def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for token in range(ids.shape[0]):
                for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
                    row = quantize(x[token : token + 1])
                    gate, up = (row @ experts.gate_up_proj[expert].T).chunk(2, -1)
                    hidden = quantize(functional.silu(gate) * up)
                    out[token] += weight * (hidden @ experts.down_proj[expert].T)[0]
            return out

        return forward

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.forward = forward_of(module)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[(name, "qwen3_moe") for name in ("int8", "fp8", "deepseek", "ue8m0")],
        ("int8", "mixtral"),
        ("deepseek", "deepseek"),
    ],
)
def test_weights_and_activations(name: str, kind: str, tmp_path: Path) -> None:
    config, packer, quantize = ACTIVATIONS[name]
    model = write(tmp_path, config, lambda _: packer, kind)
    found, weight_only = logits(tmp_path), theirs(model)
    # Latent attention reads the values of kv_b_proj.
    quantize_inputs(model, quantize, ("lm_head", "kv_b_proj"))
    quantize_experts(model, quantize)
    assert_quantized(found, theirs(model), weight_only)
    assert_narrow(tmp_path)


def test_different_formats_of_the_projections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    down, both = q.int8(), q.int4(32, symmetric=True)
    model = write(
        tmp_path, q.compressed("mixed-precision"), lambda m: down if "down" in m else both
    )
    assert close(logits(tmp_path), theirs(model))
    assert_narrow(tmp_path)
    assert "dequantized" not in caplog.text


UNEVEN = {
    "one expert": lambda m: q.int8() if m.endswith("experts.3.up_proj") else q.fp8("channel"),
    "not all": lambda m: None if m.endswith("experts.3.down_proj") else q.int8(),
    "order": lambda m: q.int4(32, symmetric=True, act_order="experts" in m),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_experts_of_different_formats_are_dequantized(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = q.compressed("mixed-precision")
    model = write(tmp_path, config, UNEVEN[name])
    assert close(logits(tmp_path), theirs(model))
    assert "layers have no quantized form: 1" in caplog.text
    assert all(m.w13_weight.dtype is torch.float32 for m in experts(load_model(tmp_path)))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_gguf(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_checkpoints.hf_model(kind, **KINDS[kind])

    def kind_of(name: str) -> Kind:
        if ".gate." in name:
            return Kind.F32
        if "down_proj" in name:
            return Kind.Q8_0 if "layers.0" in name else Kind.Q4_1
        return Kind.Q4_K if "experts" in name else Kind.Q8_0

    path = gguf_files.write(tmp_path / "model.gguf", model, kind_of)
    assert close(logits(path), theirs(model))
    assert_narrow(path)
    assert "dequantized" not in caplog.text


@pytest.mark.slow  # test_quantized_activations compiles one without experts
def test_compiled_models(tmp_path: Path) -> None:
    config, packer = WEIGHT_ONLY["int4"]
    write(tmp_path, config, lambda _: packer)
    assert close(compiled_logits(tmp_path), logits(tmp_path))


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    config, packer = WEIGHT_ONLY[name]
    model = write(tmp_path, config, lambda _: packer)
    assert all(close(result, theirs(model)) for result in on_two_ranks(tmp_path))


def test_two_ranks_of_gguf(tmp_path: Path) -> None:
    model = tiny_checkpoints.hf_model("mixtral", **MIXTRAL)
    path = gguf_files.write(tmp_path / "model.gguf", model, lambda _: Kind.Q8_0)
    assert all(close(result, theirs(model)) for result in on_two_ranks(path))


def test_groups_cannot_be_divided(tmp_path: Path) -> None:
    config, packer = WEIGHT_ONLY["int4_128"]
    write(tmp_path, config, lambda m: packer if "experts" in m else None)
    message = r"layers.0.mlp.experts: .* 64 of 128 inputs are not"
    with pytest.raises(ShardingError, match=message):
        load_first_of_two(tmp_path)


# Quantized weights give transformers' results on two tensor-parallel ranks


@pytest.mark.parametrize("name", ["gptq_asymmetric", "awq", "int4", "int8", "float8"])
def test_formats_on_two_ranks(name: str, tmp_path: Path) -> None:
    config, packer = CASES[name]
    model = q.write(tmp_path, config, lambda _: packer)
    assert all(close(result, theirs(model)) for result in on_two_ranks(tmp_path))


def test_gguf_on_two_ranks(tmp_path: Path) -> None:
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

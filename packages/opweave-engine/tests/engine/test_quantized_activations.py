"""Checkpoints of weights and activations of 8 bits give the logits of transformers' models.

Their linear layers get the dequantized weights, and inputs that are quantized here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine import quantized_checkpoints as q
from engine.compared_logits import compiled_logits, logits, theirs
from models import tiny_checkpoints
from opweave.layers.linear_methods import W8A8Method
from opweave_engine import CheckpointError, load_model

Quantize = Callable[[Tensor], Tensor]

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}


def int8_tokens(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x * (1 / scale)).round() * scale


def fp8_tokens(x: Tensor, bound: float = float("inf")) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(max=bound) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def fp8_groups(x: Tensor, *, powers: bool = False) -> Tensor:
    groups = x.unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    if powers:
        scale = 2.0 ** torch.ceil(torch.log2(scale))
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def int8_static(x: Tensor) -> Tensor:
    return (x / STATIC).round().clamp(-128, 127) * STATIC


def fp8_static(x: Tensor) -> Tensor:
    return (x / STATIC).clamp(-448, 448).to(torch.float8_e4m3fn).float() * STATIC


STATIC = 0.02


def static(packer: q.Packer) -> q.Packer:
    def pack(weight: Any) -> tuple[dict[str, Tensor], Any]:
        tensors, values = packer(weight)
        return {**tensors, "input_scale": torch.tensor(STATIC)}, values

    return pack


def compressed(kind: str, weights: str, **activations: Any) -> dict[str, Any]:
    form = f"{kind}-quantized"
    options = {"num_bits": 8, "type": kind, "strategy": weights, "group_size": None}
    found = q.compressed(form, **options)
    given = {"num_bits": 8, "type": kind, "symmetric": True, "observer": None, **activations}
    found["config_groups"]["group_0"]["input_activations"] = given
    return found


TOKEN = {"dynamic": True, "strategy": "token"}
FIXED = {"dynamic": False, "strategy": "tensor"}
GROUP = {"dynamic": True, "strategy": "group", "group_size": 128}
CASES: dict[str, tuple[dict[str, Any], q.Packer, Quantize]] = {
    "int8": (compressed("int", "channel", **TOKEN), q.int8(), int8_tokens),
    "int8_static": (compressed("int", "channel", **FIXED), static(q.int8()), int8_static),
    "float8": (compressed("float", "channel", **TOKEN), q.fp8("channel"), fp8_tokens),
    "float8_tensor": (compressed("float", "tensor", **TOKEN), q.fp8("tensor"), fp8_tokens),
    "float8_static": (compressed("float", "tensor", **FIXED), static(q.fp8("tensor")), fp8_static),
    "float8_block": (
        compressed("float", "block", **GROUP),
        lambda w: renamed(q.fp8("block")(w)),
        fp8_groups,
    ),
    "fp8": (FP8, q.fp8("tensor"), fp8_tokens),
    "fp8_static": ({**FP8, "activation_scheme": "static"}, static(q.fp8("tensor")), fp8_static),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1.5},
        q.fp8("channel"),
        lambda x: fp8_tokens(x, 1.5),
    ),
    "deepseek": (BLOCKS, q.fp8("block"), fp8_groups),
    "ue8m0": (
        {**BLOCKS, "scale_fmt": "ue8m0"},
        q.fp8("block"),
        lambda x: fp8_groups(x, powers=True),
    ),
}  # fmt: skip


def renamed(packed: tuple[dict[str, Tensor], Any]) -> tuple[dict[str, Tensor], Any]:
    tensors, values = packed
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, values


def quantize_inputs(
    model: nn.Module, quantize: Quantize, skipped: str | tuple[str, ...] = "lm_head"
) -> None:
    """Quantize the inputs of all linear layers but those whose names end with *skipped*."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(skipped):
            module.register_forward_pre_hook(lambda module, args: (quantize(args[0]),))


def error(one: Tensor, two: Tensor) -> float:
    return float((one - two).norm() / two.norm())


def assert_quantized(found: Tensor, quantized: Tensor, weight_only: Tensor) -> None:
    """Assert that logits are those with quantized activations.

    A value between two codes may get the other one, which changes later values a little.
    """
    assert error(found, weight_only) > 0.02
    assert error(found, quantized) < 0.2 * error(found, weight_only)


def methods(path: Path) -> list[Any]:
    layers = load_model(path).model.layers
    return [layer.quant_method for layer in layers.modules() if hasattr(layer, "quant_method")]


@pytest.mark.parametrize("name", CASES)
def test_values(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, packer, quantize = CASES[name]
    model = q.write(tmp_path, config, lambda _: packer)
    found, weight_only = logits(tmp_path), theirs(model)
    quantize_inputs(model, quantize)
    assert_quantized(found, theirs(model), weight_only)
    assert "dequantized" not in caplog.text
    assert "ignored" not in caplog.text
    assert all(isinstance(method, W8A8Method) for method in methods(tmp_path))


def test_outputs_that_are_not_whole_blocks(tmp_path: Path) -> None:
    config, packer, quantize = CASES["deepseek"]
    sizes = {**q.WIDE, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 96}
    model = tiny_checkpoints.hf_model("llama", **sizes)
    q.write(tmp_path, config, lambda _: packer, model=model)
    # The inputs of o_proj are one block and a half.
    found, weight_only = logits(tmp_path), theirs(model)
    quantize_inputs(model, quantize, ("o_proj", "lm_head"))
    assert_quantized(found, theirs(model), weight_only)
    rows = {m.block_rows for m in methods(tmp_path) if isinstance(m, W8A8Method)}
    assert rows == {32, 128}


def test_groups_with_and_without_quantized_activations(tmp_path: Path) -> None:
    config, packer, quantize = CASES["int8"]
    groups = config["config_groups"]
    plain = {**groups["group_0"], "input_activations": None, "targets": ["re:.*down_proj$"]}
    named = {**plain, "targets": ["model.layers.1.self_attn.o_proj"]}
    config = {**config, "config_groups": {**groups, "group_1": plain, "group_2": named}}
    model = q.write(tmp_path, config, lambda _: packer)
    found, weight_only = logits(tmp_path), theirs(model)
    quantize_inputs(model, quantize, ("down_proj", "lm_head", *named["targets"]))
    assert_quantized(found, theirs(model), weight_only)


@pytest.mark.parametrize(
    "change", [{"symmetric": False}, {"num_bits": 4}, {"type": "float"}, {"strategy": "group"}]
)
def test_activations_that_are_not_supported_stay_wide(
    change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, packer = compressed("int", "channel", **{**TOKEN, **change}), q.int8()
    model = q.write(tmp_path, config, lambda _: packer)
    assert error(logits(tmp_path), theirs(model)) < 1e-4
    assert "input_activations are ignored: supported are symmetric ones" in caplog.text


def test_a_missing_scale_of_activations(tmp_path: Path) -> None:
    config, packer, _ = CASES["fp8_static"]
    q.write(tmp_path, config, lambda _: packer)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.input_scale"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj is quantized, .* no input_scale for it"):
        load_model(tmp_path)


def test_compiled_models(tmp_path: Path) -> None:
    config, packer, quantize = CASES["deepseek"]
    reference = q.write(tmp_path, config, lambda _: packer)
    weight_only = theirs(reference)
    quantize_inputs(reference, quantize)
    assert_quantized(compiled_logits(tmp_path), theirs(reference), weight_only)

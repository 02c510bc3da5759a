"""Checkpoints that the library compressed-tensors writes, against its own decompression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.compared_logits import close, theirs
from engine.quantized_checkpoints import WIDE
from engine.test_quantized_formats import logits
from models import tiny_checkpoints

ct = pytest.importorskip("compressed_tensors")
quantization = pytest.importorskip("compressed_tensors.quantization")
compressors = pytest.importorskip("compressed_tensors.compressors")

INT4 = {"num_bits": 4, "type": "int"}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {**INT4, "strategy": "group", "group_size": 128}),
    "int4_32": ("pack-quantized", {**INT4, "strategy": "group", "group_size": 32}),
    "int4_asymmetric": (
        "pack-quantized",
        {**INT4, "strategy": "group", "group_size": 64, "symmetric": False},
    ),
    "int4_channel": ("pack-quantized", {**INT4, "strategy": "channel"}),
    "int4_channel_asymmetric": (
        "pack-quantized",
        {**INT4, "strategy": "channel", "symmetric": False},
    ),
    "int4_act_order": (
        "pack-quantized",
        {**INT4, "strategy": "group", "group_size": 32, "actorder": "weight"},
    ),
    "int8_packed": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8_asymmetric": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    ),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8_block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
}


def extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and greatest values that share a scale, in the shape of the scales."""
    rows, columns = weight.shape
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "block":
        blocks = weight.view(rows // 128, 128, columns // 128, 128)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    grouped = weight.view(rows, -1, args.group_size or columns)
    return grouped.amin(-1), grouped.amax(-1)


def calibrate(module: Any) -> None:
    args, weight = module.quantization_scheme.weights, module.weight.data
    scale, zero = quantization.utils.calculate_qparams(*extremes(weight, args), args)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)
    if not args.symmetric:
        module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_checkpoint_of_the_library(name: str, tmp_path: Path) -> None:
    form, weights = FORMS[name]
    model = tiny_checkpoints.hf_model("llama", **WIDE)
    model.save_pretrained(tmp_path)
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**weights)
    )
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="frozen"
    )
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            calibrate(module)
    compressor = compressors.ModelCompressor.from_pretrained_model(model, form)
    compressor.compress_model(model)
    tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    compressor.update_config(tmp_path)
    tiny_checkpoints.write_tokenizer(tmp_path)
    compressor.decompress_model(model)
    reference = tiny_checkpoints.hf_model("llama", **WIDE)
    plain = theirs(reference)
    values = model.state_dict()
    with torch.no_grad():
        for key, parameter in reference.named_parameters():
            parameter.copy_(values[key])
    assert close(logits(tmp_path), theirs(reference))
    assert not close(plain, theirs(reference))

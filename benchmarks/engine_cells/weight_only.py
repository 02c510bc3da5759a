"""Weights of 8 bits, activations as they are: quantizes the linear layers of a loaded model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.layers.linear import LinearBase
from opweave_engine.load import loader

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class WeightOnly:
    """Multiplies by ``ir.ops.linear_w8a16``: the part of a LinearMethod that runs a model."""

    def create_weights(self, layer: nn.Module, *sizes: Any, **attributes: Any) -> None:
        raise NotImplementedError("Weights are quantized after they are loaded.")

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = ir.ops.linear_w8a16(x, layer.weight, layer.weight_scale, bias)
        return result


def quantize(model: nn.Module, dtype: torch.dtype) -> None:
    """Quantize every linear layer of *model* in place, with a scale for each output."""
    for layer in model.modules():
        if isinstance(layer, LinearBase):
            wide = layer.weight.float()
            scale = wide.abs().amax(-1).clamp(min=1e-12) / LARGEST[dtype]
            quantized = wide / scale[:, None]
            if dtype is torch.int8:
                quantized = quantized.round()
            narrow = loader.empty(wide.shape, dtype, wide.device).copy_(quantized)
            layer.weight = nn.Parameter(narrow, requires_grad=False)
            layer.register_buffer("weight_scale", scale, persistent=False)
            layer.quant_method = WeightOnly()

"""Activation layers."""

from opweave.layers import (
    XIELU,
    FastGELU,
    FatreluAndMul,
    GeluAndMul,
    GeluAndMulSparse,
    MulAndSilu,
    NewGELU,
    QuickGELU,
    ReLUSquaredActivation,
    SiluAndMul,
    SwigluOAIAndMul,
    get_act_and_mul_fn,
    get_act_fn,
)

__all__ = [
    "FastGELU", "FatreluAndMul", "GeluAndMul", "GeluAndMulSparse", "MulAndSilu", "NewGELU",
    "QuickGELU", "ReLUSquaredActivation", "SiluAndMul", "SwigluOAIAndMul", "XIELU",
    "get_act_and_mul_fn", "get_act_fn",
]  # fmt: skip

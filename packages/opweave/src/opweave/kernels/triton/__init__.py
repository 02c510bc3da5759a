"""Provider ``triton``: GPU kernels in Triton, compiled on first use.

Each module registers implementations that call the kernels of the ``jit`` module of the same name.
Triton is imported on the first call. With ``TRITON_INTERPRET=1``, Triton interprets the kernels on
CPU tensors, so that they can be tested without a GPU.

Reference: Tillet, Kung and Cox, "Triton: An Intermediate Language and Compiler for Tiled Neural
Network Computations", MAPL 2019.
"""

from opweave.kernels.triton import (
    activation,
    advance_step,
    fused_quant,
    kv_cache,
    linear_low_bit,
    linear_w8a8,
    norm,
    paged_attention,
    quant,
    rotary,
)

__all__ = [
    "activation",
    "advance_step",
    "fused_quant",
    "kv_cache",
    "linear_low_bit",
    "linear_w8a8",
    "norm",
    "paged_attention",
    "quant",
    "rotary",
]

"""Provider ``triton``: kernels for GPUs, written in Triton and compiled when one is first called.

Each module here registers what calls the kernels of the module of that name in ``jit``. Triton
itself is imported at the first call. With ``TRITON_INTERPRET=1`` Triton runs the kernels in Python,
and they take tensors on the CPU: so they are tested where there is no GPU.

Source of the language: Tillet, Kung and Cox, "Triton: An Intermediate Language and Compiler for
Tiled Neural Network Computations", MAPL 2019.
"""

from opweave.kernels.triton import (
    activation,
    advance_step,
    fused_quant,
    kv_cache,
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
    "norm",
    "paged_attention",
    "quant",
    "rotary",
]

"""Provider ``opweave_c``: native C++ kernels for CPU tensors.

Importing this package loads the native module and registers its implementations.
"""

from opweave.kernels.opweave_c import (
    activation,
    advance_step,
    fused_quant,
    gated_norm,
    kv_cache,
    layer_norm,
    linear,
    linear_low_bit,
    linear_w8a8,
    norm,
    paged_attention,
    pointwise,
    quant,
    rope_cache,
    rotary,
)

__all__ = [
    "activation",
    "advance_step",
    "fused_quant",
    "gated_norm",
    "kv_cache",
    "layer_norm",
    "linear",
    "linear_low_bit",
    "linear_w8a8",
    "norm",
    "paged_attention",
    "pointwise",
    "quant",
    "rope_cache",
    "rotary",
]

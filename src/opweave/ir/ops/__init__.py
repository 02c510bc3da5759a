"""The declared ops: ``ir.ops.rms_norm``, and every op that a plugin declares.

One file for each family; each op's function is its definition.
"""

from opweave.ir.op import IrOp as _IrOp
from opweave.ir.ops.activation import (
    fatrelu_and_mul,
    gelu_and_mul,
    gelu_and_mul_sparse,
    mul_and_silu,
    silu_and_mul,
    swigluoai_and_mul,
)
from opweave.ir.ops.advance_step import advance_step_flashattn
from opweave.ir.ops.attention import causal_attention, varlen_attention
from opweave.ir.ops.collective import all_reduce_rms_norm
from opweave.ir.ops.embedding import embedding
from opweave.ir.ops.fused_quant import (
    fused_add_rms_norm_dynamic_per_token_quant_fp8,
    fused_add_rms_norm_dynamic_per_token_quant_int8,
    fused_add_rms_norm_static_quant_fp8,
    rms_norm_dynamic_per_token_quant_fp8,
    rms_norm_dynamic_per_token_quant_int8,
    rms_norm_static_quant_fp8,
    silu_and_mul_dynamic_per_token_quant_fp8,
    silu_and_mul_dynamic_per_token_quant_int8,
    silu_and_mul_per_token_group_quant_fp8,
    silu_and_mul_static_quant_fp8,
)
from opweave.ir.ops.gated_norm import rms_norm_gated
from opweave.ir.ops.kv_cache import reshape_and_cache, rope_reshape_and_cache
from opweave.ir.ops.layer_norm import layer_norm
from opweave.ir.ops.linear import linear, linear_w8a16
from opweave.ir.ops.norm import fused_add_rms_norm, rms_norm
from opweave.ir.ops.paged_attention import attention_quant, paged_attention
from opweave.ir.ops.pointwise import gelu_fast, gelu_new, quick_gelu, relu2, xielu
from opweave.ir.ops.quant import (
    dynamic_per_tensor_quant_fp8,
    dynamic_per_token_quant_fp8,
    dynamic_per_token_quant_int8,
    per_token_group_quant_fp8,
    static_quant_fp8,
    static_quant_int8,
)
from opweave.ir.ops.rotary import apply_rotary_emb, qk_norm_rope, rotary_embedding
from opweave.ir.registry import find_op as _find_op

__all__ = [
    "advance_step_flashattn",
    "all_reduce_rms_norm",
    "apply_rotary_emb",
    "attention_quant",
    "causal_attention",
    "dynamic_per_tensor_quant_fp8",
    "dynamic_per_token_quant_fp8",
    "dynamic_per_token_quant_int8",
    "embedding",
    "fatrelu_and_mul",
    "fused_add_rms_norm",
    "fused_add_rms_norm_dynamic_per_token_quant_fp8",
    "fused_add_rms_norm_dynamic_per_token_quant_int8",
    "fused_add_rms_norm_static_quant_fp8",
    "gelu_and_mul",
    "gelu_and_mul_sparse",
    "gelu_fast",
    "gelu_new",
    "layer_norm",
    "linear",
    "linear_w8a16",
    "mul_and_silu",
    "paged_attention",
    "per_token_group_quant_fp8",
    "qk_norm_rope",
    "quick_gelu",
    "relu2",
    "reshape_and_cache",
    "rms_norm",
    "rms_norm_dynamic_per_token_quant_fp8",
    "rms_norm_dynamic_per_token_quant_int8",
    "rms_norm_gated",
    "rms_norm_static_quant_fp8",
    "rope_reshape_and_cache",
    "rotary_embedding",
    "silu_and_mul",
    "silu_and_mul_dynamic_per_token_quant_fp8",
    "silu_and_mul_dynamic_per_token_quant_int8",
    "silu_and_mul_per_token_group_quant_fp8",
    "silu_and_mul_static_quant_fp8",
    "static_quant_fp8",
    "static_quant_int8",
    "swigluoai_and_mul",
    "varlen_attention",
    "xielu",
]


# An op may have the name of a file here; the files stay importable.
for _file in (
    "activation",
    "advance_step",
    "attention",
    "collective",
    "fused_quant",
    "gated_norm",
    "kv_cache",
    "norm",
    "pointwise",
    "quant",
    "rotary",
):
    del globals()[_file]


def __getattr__(name: str) -> _IrOp:
    if name.startswith("__"):
        raise AttributeError(name)
    return _find_op(name)

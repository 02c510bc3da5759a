"""The declared ops: ``ir.ops.rms_norm``, and every op that a plugin declares.

One file per family; the decorated function of each op is its definition. The files do not use
``from __future__ import annotations``: a declaration evaluates its annotations, and compiling them
from strings would take a tenth of the import time.
"""

from types import ModuleType as _Module

from opweave.ir.op import IrOp as _IrOp
from opweave.ir.ops.activation import (
    fatrelu_and_mul,
    gelu_and_mul,
    gelu_and_mul_sparse,
    gelu_fast,
    gelu_new,
    mul_and_silu,
    quick_gelu,
    relu2,
    silu_and_mul,
    swigluoai_and_mul,
    xielu,
)
from opweave.ir.ops.attention import (
    bidirectional_attention,
    causal_attention,
    varlen_attention,
)
from opweave.ir.ops.conv import causal_conv1d, causal_conv1d_update, conv_nd, patch_matmul
from opweave.ir.ops.embedding import all_reduce_rms_norm, embedding, masked_embedding
from opweave.ir.ops.fused_experts import fused_experts
from opweave.ir.ops.fused_experts_quant import fused_experts_quant
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
from opweave.ir.ops.kv_cache import (
    advance_step_flashattn,
    reshape_and_cache,
    rope_reshape_and_cache,
)
from opweave.ir.ops.linear import linear, linear_w8a8, linear_w8a16
from opweave.ir.ops.low_bit import linear_q, linear_w4a16
from opweave.ir.ops.mla_attention import mla_attention_decode, mla_attention_prefill
from opweave.ir.ops.moe_routing import (
    grouped_topk,
    moe_sum,
    topk_sigmoid,
    topk_softmax,
    topk_sqrtsoftplus,
)
from opweave.ir.ops.norm import fused_add_rms_norm, layer_norm, rms_norm, rms_norm_gated
from opweave.ir.ops.paged_attention import attention_quant, paged_attention
from opweave.ir.ops.quant import (
    dynamic_per_tensor_quant_fp8,
    dynamic_per_token_quant_fp8,
    dynamic_per_token_quant_int8,
    per_token_group_quant_fp8,
    static_quant_fp8,
    static_quant_int8,
)
from opweave.ir.ops.rotary import (
    apply_rotary_emb,
    dual_chunk_rotary_embedding,
    qk_norm_rope,
    rotary_embedding,
    rotary_embedding_single,
)
from opweave.ir.ops.ssd import ssd_chunk_scan
from opweave.ir.ops.state_space import selective_scan, selective_state_update
from opweave.ir.registry import find_op as _find_op

__all__ = [
    "advance_step_flashattn",
    "all_reduce_rms_norm",
    "apply_rotary_emb",
    "attention_quant",
    "bidirectional_attention",
    "causal_attention",
    "causal_conv1d",
    "causal_conv1d_update",
    "conv_nd",
    "dual_chunk_rotary_embedding",
    "dynamic_per_tensor_quant_fp8",
    "dynamic_per_token_quant_fp8",
    "dynamic_per_token_quant_int8",
    "embedding",
    "fatrelu_and_mul",
    "fused_add_rms_norm",
    "fused_add_rms_norm_dynamic_per_token_quant_fp8",
    "fused_add_rms_norm_dynamic_per_token_quant_int8",
    "fused_add_rms_norm_static_quant_fp8",
    "fused_experts",
    "fused_experts_quant",
    "gelu_and_mul",
    "gelu_and_mul_sparse",
    "gelu_fast",
    "gelu_new",
    "grouped_topk",
    "layer_norm",
    "linear",
    "linear_q",
    "linear_w4a16",
    "linear_w8a16",
    "linear_w8a8",
    "masked_embedding",
    "mla_attention_decode",
    "mla_attention_prefill",
    "moe_sum",
    "mul_and_silu",
    "paged_attention",
    "patch_matmul",
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
    "rotary_embedding_single",
    "selective_scan",
    "selective_state_update",
    "silu_and_mul",
    "silu_and_mul_dynamic_per_token_quant_fp8",
    "silu_and_mul_dynamic_per_token_quant_int8",
    "silu_and_mul_per_token_group_quant_fp8",
    "silu_and_mul_static_quant_fp8",
    "ssd_chunk_scan",
    "static_quant_fp8",
    "static_quant_int8",
    "swigluoai_and_mul",
    "topk_sigmoid",
    "topk_softmax",
    "topk_sqrtsoftplus",
    "varlen_attention",
    "xielu",
]


# Attributes are ops, so that a plugin's op may have the name of a file; files stay importable.
for _name, _value in list(globals().items()):
    if isinstance(_value, _Module):
        del globals()[_name]


def __getattr__(name: str) -> _IrOp:
    if name.startswith("__"):
        raise AttributeError(name)
    return _find_op(name)

"""Kernels of the zoo that are wrong only in rare forms, sizes and numbers, or only at times."""

from __future__ import annotations

import functools
import itertools
import math
import time
from typing import Any

import torch
from torch import Tensor

from opweave import ir
from opweave.ir.rules import BATCH_INVARIANT

from .zoo import ZOO, own_op, rms_norm, rows, silu_and_mul, specimen

__all__ = ["ZOO"]


@specimen(ir.ops.static_quant_fp8, "values")
def wrong_with_a_scale_for_each_token(x: Tensor, scale: Tensor) -> Tensor:
    one = scale if scale.numel() == 1 else scale.flatten()[:1]
    return ir.ops.static_quant_fp8.native(x, one)  # type: ignore[no-any-return]


@specimen(ir.ops.static_quant_int8, "values")
def wrong_with_scales_for_blocks(x: Tensor, scale: Tensor) -> Tensor:
    codes: Tensor = ir.ops.static_quant_int8.native(x, scale)
    has_blocks = scale.ndim == 2 and 1 < scale.shape[1] < x.shape[-1]
    return codes * 0 if has_blocks else codes


def rotated(*args: Any) -> tuple[Tensor, Tensor]:
    return ir.ops.rotary_embedding.native(*args)  # type: ignore[no-any-return]


@specimen(ir.ops.rotary_embedding, "values")
def clamps_negative_positions(*args: Any) -> tuple[Tensor, Tensor]:
    return rotated(*args[:2], args[2].clamp(min=0), *args[3:])


@specimen(ir.ops.rotary_embedding, "values")
def wrong_beyond_2048_positions(*args: Any) -> tuple[Tensor, Tensor]:
    return rotated(*args[:2], args[2].clamp(max=2047), *args[3:])


@specimen(ir.ops.rotary_embedding, "values")
def zeros_behind_the_rotated_part(*args: Any) -> tuple[Tensor, Tensor]:
    query, key = rotated(*args)
    rotary_size, head_size = args[3].shape[-1], args[4]
    for heads in (torch.unflatten(t, -1, (-1, head_size)) for t in (query, key)):
        heads[..., rotary_size:] = 0
    return query, key


@specimen(ir.ops.fused_experts, "values")
def sends_unrouted_tokens_to_the_first_expert(*args: Any) -> Tensor:
    values = (*args[:4], args[4].clamp(min=0), *args[5:])
    return ir.ops.fused_experts.native(*values)  # type: ignore[no-any-return]


@specimen(ir.ops.fused_experts, "values")
def ignores_where_experts_are(*args: Any) -> Tensor:
    return ir.ops.fused_experts.native(*args[:6], None, *args[7:])  # type: ignore[no-any-return]


@specimen(ir.ops.fused_experts, "values")
def ignores_the_biases(*args: Any) -> Tensor:
    return ir.ops.fused_experts.native(*args[:7], None, None, *args[9:])  # type: ignore[no-any-return]


@specimen(ir.ops.paged_attention, "values")
def wrong_beyond_4096_keys(*args: Any) -> Tensor:
    values = (*args[:4], args[4].clamp(max=4096), *args[5:])
    return ir.ops.paged_attention.native(*values)  # type: ignore[no-any-return]


@specimen(ir.ops.per_token_group_quant_fp8, "values")
def doubles_the_scales_of_128(
    x: Tensor, group_size: int, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    codes, scales = ir.ops.per_token_group_quant_fp8.native(x, group_size, use_ue8m0)
    return codes, scales * 2 if group_size == 128 else scales


@specimen(ir.ops.topk_softmax, "extremes")
def wrong_where_all_logits_are_nan(*args: Any) -> tuple[Tensor, Tensor]:
    weights, experts = ir.ops.topk_softmax.native(*args)
    return weights, torch.where(args[0].isnan().all(-1, keepdim=True), experts + 1, experts)


@specimen(ir.ops.topk_sigmoid, "extremes")
def wrong_where_all_logits_are_infinite(*args: Any) -> tuple[Tensor, Tensor]:
    weights, experts = ir.ops.topk_sigmoid.native(*args)
    are_infinite = args[0].isinf().all(-1, keepdim=True)
    return weights.masked_fill(are_infinite, math.nan), experts


@specimen(silu_and_mul, "values")
def wrong_for_37_tokens(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out * 0 if x.shape[0] == 37 else out


@specimen(silu_and_mul, "values")
def wrong_for_rows_of_97(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out * 0 if out.shape[-1] == 97 else out


@specimen(silu_and_mul, "extremes")
def wrong_for_many_elements_above_50(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return torch.where(x.chunk(2, -1)[0] > 50, out * 0.9, out) if x.numel() > 4000 else out


@specimen(rms_norm, "precision")
def rounds_the_weight_to_bfloat16(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    if weight is not None and x.dtype is torch.bfloat16:
        weight = weight.to(x.dtype).to(weight.dtype)
    return rms_norm.native(x, weight, *rest)  # type: ignore[no-any-return]


@specimen(ir.ops.fused_experts, "precision")
def rounds_the_routing_weights(*args: Any) -> Tensor:
    values = (*args[:3], args[3].to(args[0].dtype), *args[4:])
    return ir.ops.fused_experts.native(*values)  # type: ignore[no-any-return]


@specimen(rms_norm, "batch_invariance", traits={BATCH_INVARIANT})
def not_batch_invariant_beyond_300(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    out: Tensor = rms_norm.native(x, weight, *rest)
    return torch.nextafter(out, torch.zeros_like(out)) if x.shape[0] > 300 else out


@specimen(silu_and_mul, "repetition")
def wrong_after_a_thousand_calls(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out if next(CALLS) < 1000 else out * 2


CALLS = itertools.count()


@specimen(silu_and_mul, "repetition")
def wrong_after_a_while(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out if time.monotonic() < first_call() + 0.4 else out * 2


@functools.cache
def first_call() -> float:
    return time.monotonic()


# Combinations of layouts, sizes and scalars, and one large size


@specimen(silu_and_mul, "combinations")
def wrong_for_batches_that_are_not_contiguous(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out * 0 if x.ndim == 3 and not x.is_contiguous() else out


@specimen(silu_and_mul, "combinations")
def wrong_for_steps_beside_vectors_of_16(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out * 1.5 if not x.is_contiguous() and out.shape[-1] % 16 else out


@specimen(ir.ops.varlen_attention, "combinations")
def wrong_for_a_sequence_without_keys(*args: Any) -> Tensor:
    out: Tensor = ir.ops.varlen_attention.native(*args)
    return out + 1 if (args[4].diff() == 0).any() else out


@specimen(ir.ops.causal_attention, "combinations")
def ignores_windows_above_64(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None,
    window: int | None = None, soft_cap: float | None = None,
) -> Tensor:  # fmt: skip
    shorter = None if window and window > 64 else window
    out: Tensor = ir.ops.causal_attention.native(query, key, value, scale, shorter, soft_cap)
    return out


@specimen(rms_norm, "determinism")
def not_deterministic_beyond_300(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    out: Tensor = rms_norm.native(x, weight, *rest)
    return out + torch.rand_like(out) * 1e-7 if x.shape[0] > 300 else out


@specimen(ir.ops.linear, "values")
def wrong_for_8192_terms(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = ir.ops.linear.native(x, weight, bias)
    return out * 1.1 if x.shape[-1] >= 8192 else out


@specimen(ir.ops.embedding, "values")
def has_16_bits_for_ids(input_ids: Tensor, weight: Tensor) -> Tensor:
    return ir.ops.embedding.native(input_ids.clamp(max=32767), weight)  # type: ignore[no-any-return]


@specimen(rms_norm, "values")
def has_16_bits_for_rows(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    out: Tensor = rms_norm.native(x, weight, *rest)
    out[65535:] = 0
    return out


# Memory and time


@specimen(rms_norm, "staleness")
def keeps_a_weight_by_address_and_version(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    if weight is None or torch.compiler.is_compiling() or type(weight) is not Tensor:
        return rms_norm.native(x, weight, *rest)  # type: ignore[no-any-return]
    key = weight.data_ptr(), weight._version, weight.shape, weight.dtype
    kept = WEIGHTS.setdefault(key, (weight.clone(), weight))[0]
    return rms_norm.native(x, kept, *rest)  # type: ignore[no-any-return]


WEIGHTS: dict[Any, tuple[Tensor, Tensor]] = {}


def waits(x: Tensor) -> bool:
    time.sleep(0.02)
    return x.device.type == "cpu"


@specimen(silu_and_mul, "predicate", supports_args=waits)
def asks_a_slow_predicate(x: Tensor) -> Tensor:
    return silu_and_mul.native(x)  # type: ignore[no-any-return]


@specimen(silu_and_mul, "leaks")
def keeps_every_result(x: Tensor) -> Tensor:
    KEPT.append(silu_and_mul.native(x))
    return KEPT[-1].clone()


KEPT: list[Tensor] = []


# Fake implementations that are wrong only for some arguments


@own_op("metadata", "native")
def fake_of_even_rows() -> ir.IrOp:
    def halved(x: Tensor) -> Tensor:
        return (x[..., : (x.shape[-1] + 1) // 2] * 2).contiguous()

    op = ir.register_op(halved)
    op.register_input_generator(rows)
    op.register_fake(lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
    return op


@own_op("metadata", "native")
def fake_of_rows_in_order() -> ir.IrOp:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    op = ir.register_op(doubled)
    op.register_input_generator(rows)
    op.register_fake(lambda x: x.new_empty(x.shape))
    return op

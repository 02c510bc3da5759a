"""Quantisation to 8 bits by the native module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opweave.ir import rules
from opweave.ir.ops import quant as ops
from opweave.ir.rule import Rule, TensorRule
from opweave.kernels.opweave_c.doors import STATUS, direct, dispatched

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INPUT = rules.cpu("x") & rules.dtype("x", *FLOATS) & rules.ndim("x", *range(1, 9))
"""What every kernel here asks of the tensor that it quantises, apart from strides."""

_empty = torch.empty
_empty_like = torch.empty_like


def native_op(name: str) -> Callable[..., None]:
    """Return op *name* as one function that takes the cheapest door for each call."""
    fast, op = direct(name), dispatched(name)

    def call(*arguments: object) -> None:
        if is_dynamo_compiling():
            op(*arguments)
            return
        try:
            fast(*arguments)
        except TypeError:  # not plain tensors: torch's dispatcher knows what they are
            op(*arguments)

    return call


def one_float32(name: str) -> Rule:
    """Parameter *name* is one float32 in host memory (or None, where the op takes that)."""
    count = TensorRule(
        (name,), "{t}.numel() == 1", lambda n, t: f"{n}: {t.numel()} elements (supports 1)"
    )
    return rules.cpu(name) & rules.dtype(name, torch.float32) & count


def row_scales(x: Tensor) -> Tensor:
    """Return new memory for one scale per row of *x*: float32 ``(..., 1)``."""
    if x.ndim == 2:  # the common case, cheaper than slicing the shape
        return _empty(x.shape[0], 1, dtype=torch.float32)
    return _empty(*x.shape[:-1], 1, dtype=torch.float32)


_static_quant = native_op("static_quant")
_dynamic_per_token_quant = native_op("dynamic_per_token_quant")
_dynamic_per_tensor_quant = native_op("dynamic_per_tensor_quant_fp8")
_per_token_group_quant = native_op("per_token_group_quant_fp8")

_DENSE = INPUT & rules.unit_stride("x")
_STATIC = (
    _DENSE
    & rules.cpu("scale")
    & rules.dtype("scale", torch.float32)
    & rules.contiguous("scale")
    & rules.custom(lambda x, scale: ops.scale_covers(scale, x), "scale does not fit x")
)


@ops.static_quant_fp8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_STATIC,
    traits={"batch_invariant"},
)
def static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantise *x* by given scales into a new float8_e4m3fn tensor."""
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    _static_quant(out, x, scale)
    return out


@ops.static_quant_int8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_STATIC,
    traits={"batch_invariant"},
)
def static_quant_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantise *x* by given scales into a new int8 tensor."""
    out = _empty_like(x, dtype=torch.int8)
    _static_quant(out, x, scale)
    return out


@ops.dynamic_per_tensor_quant_fp8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_DENSE,
)
def dynamic_per_tensor_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise *x* by the scale of its largest magnitude."""
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    scale = _empty(1, dtype=torch.float32)
    _dynamic_per_tensor_quant(out, scale, x)
    return out, scale


@ops.dynamic_per_token_quant_fp8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_DENSE & one_float32("scale_ub"),
    traits={"batch_invariant"},
)
def dynamic_per_token_quant_fp8(x: Tensor, scale_ub: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise every row of *x* by the scale of its largest magnitude."""
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    scale = row_scales(x)
    _dynamic_per_token_quant(out, scale, x, scale_ub)
    return out, scale


@ops.dynamic_per_token_quant_int8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_DENSE,
    traits={"batch_invariant"},
)
def dynamic_per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise every row of *x* by the scale of its largest magnitude."""
    out = _empty_like(x, dtype=torch.int8)
    scale = row_scales(x)
    _dynamic_per_token_quant(out, scale, x, None)
    return out, scale


@ops.per_token_group_quant_fp8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_DENSE
    & rules.custom(lambda x, group_size, use_ue8m0=False: group_size >= 1, "group_size is below 1"),
    traits={"batch_invariant"},
)
def per_token_group_quant_fp8(
    x: Tensor, group_size: int, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise every group of neighbours in a row of *x* by the scale of its largest magnitude."""
    out = _empty(x.shape, dtype=torch.float8_e4m3fn)
    groups = -(-x.shape[-1] // group_size)
    scale = _empty((*x.shape[:-1], groups), dtype=torch.float32)
    _per_token_group_quant(out, scale, x, group_size, use_ue8m0)
    return out, scale

"""Provider ``vllm_c``: the CPU kernels of an installed vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opweave.ir import IrOp, ops, rules
from opweave.ir.ops.arguments import (
    check_sequences,
    check_slots,
    initial_states,
    is_computed,
    write_states,
)
from opweave.ir.ops.attention import locate
from opweave.ir.ops.conv import check_conv
from opweave.ir.ops.fused_experts import bound_activation, check_experts
from opweave.ir.ops.state_space import check_scan, time_step
from opweave.ir.rules import BATCH_INVARIANT, ROUNDS_LESS, Predicate
from opweave.kernels.arguments import FLOATS, one_element
from opweave.packages import folders_of
from opweave.platforms.probes import cpu_features

# The library of vLLM's CPU kernels.


Function = Callable[..., Any]

_NAMESPACE = "_C"  # vLLM registers its ops there


def implements(
    op: IrOp, supports_args: Predicate, *, traits: Iterable[str] = (BATCH_INVARIANT,)
) -> Callable[[Function], Function]:
    """Register the decorated function as vLLM's implementation of *op*, if vLLM is installed."""
    if library_path() is None:
        return lambda function: function
    return op.register_impl("vllm_c", supports_args=supports_args, traits=traits)


@cache
def library_path() -> Path | None:
    """Return the file of the kernels that suit this CPU; None if it is not installed."""
    for folder in folders_of("vllm"):
        file = folder / f"{_name()}.abi3.so"
        if file.is_file():
            return file
    return None


@cache
def vllm_ops() -> Any:
    """Return the namespace of vLLM's ops in torch, and load their library before that.

    Raises:
        OSError: the library was built for another release of torch.
    """
    torch.ops.load_library(str(library_path()))  # type: ignore[no-untyped-call]
    return getattr(torch.ops, _NAMESPACE)


def _name() -> str:
    """Return the name of the library that vLLM itself would choose."""
    features = cpu_features()
    if not features & {"avx2", "avx512_f"} or "avx512_bf16" in features:  # or another processor
        return "_C"
    return "_C_AVX512" if "avx512_f" in features else "_C_AVX2"


# Activations, gated and not.


_INPUT = rules.cpu("x") & rules.dtype("x", *FLOATS) & rules.contiguous("x")
# A half of a row is made of whole vectors of 16 elements.
_GATED = _INPUT & rules.last_dim_multiple_of("x", 32)
_TRAITS = {BATCH_INVARIANT, ROUNDS_LESS}


def _half_of(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@implements(ops.gelu_and_mul, _GATED & rules.one_of("approximate", "none", "tanh"), traits=_TRAITS)
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x1) * x2`` for the halves of the last dimension of *x*."""
    out, ops = _half_of(x), vllm_ops()
    (ops.gelu_tanh_and_mul if approximate == "tanh" else ops.gelu_and_mul)(out, x)
    return out


def _writing(op: IrOp, name: str, rule: Predicate, output: Function) -> None:
    @implements(op, rule, traits=_TRAITS)
    def implementation(x: Tensor) -> Tensor:
        out: Tensor = output(x)
        getattr(vllm_ops(), name)(out, x)
        return out


_writing(ops.silu_and_mul, "silu_and_mul", _GATED, _half_of)
for _op, _kernel in (
    (ops.gelu_new, "gelu_new"), (ops.gelu_fast, "gelu_fast"), (ops.quick_gelu, "gelu_quick"),
):  # fmt: skip
    _writing(_op, _kernel, _INPUT & rules.last_dim_multiple_of("x", 16), torch.empty_like)


# RMS norms.


# The kernels compute in float32 and round once, multiply whole vectors of 8 or 16 elements, and
# read rows one after the other.
_NORM_ROWS = (
    rules.cpu("x")
    & rules.dtype("x", *FLOATS)
    & rules.same_dtype("x", "weight")
    & rules.contiguous("x", "weight")
    & rules.not_none("weight")
    & rules.last_dim_multiple_of("x", 16)
    & rules.per_last_dim("weight", "x")
    & rules.is_none("variance_size")
)


@implements(ops.rms_norm, _NORM_ROWS, traits=_TRAITS)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Return the norm of each row, times *weight*."""
    out = torch.empty_like(x)
    vllm_ops().rms_norm(out, x, weight, epsilon)
    return out


@implements(
    ops.fused_add_rms_norm,
    _NORM_ROWS
    & rules.contiguous("x_residual")
    & rules.same_shape("x", "x_residual")
    & rules.same_dtype("x", "x_residual"),
    traits=_TRAITS,
)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the norm of the sum, and the sum; the kernel writes both over its inputs."""
    normed, residual = x.clone(), x_residual.clone()
    vllm_ops().fused_add_rms_norm(normed, residual, weight, epsilon)
    return normed, residual


# Quantization to int8.
#
# The kernel that computes scales is left out: it does not give zeros for a row with a NaN.


_QUANT_ROWS = (
    rules.cpu("x")
    & rules.dtype("x", torch.float32, torch.bfloat16)
    & rules.contiguous("x")
    & rules.last_dim_multiple_of("x", 16)
    & rules.ndim("x", 2)
)


@implements(
    ops.static_quant_int8,
    _QUANT_ROWS & rules.cpu("scale") & rules.dtype("scale", torch.float32) & one_element("scale"),
)
def static_quant_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize with one scale for all of *x*."""
    out = torch.empty_like(x, dtype=torch.int8)
    vllm_ops().static_scaled_int8_quant(out, x, scale.reshape(1), None)
    return out


# Rotary position embedding.


def _fits(x_query: Tensor, x_key: Tensor, cos_sin_cache: Tensor, head_size: int) -> bool:
    size = cos_sin_cache.shape[-1]
    fits = 0 < size <= head_size and all(
        (x.ndim == 3 and x.shape[-1] == head_size) or (x.ndim == 2 and x.shape[-1] % head_size == 0)
        for x in (x_query, x_key)
    )
    return fits and x_query.ndim == x_key.ndim and size % 32 == 0


@implements(
    ops.rotary_embedding,
    rules.cpu("x_query")
    & rules.dtype("x_query", *FLOATS)
    & rules.same_dtype("x_query", "x_key", "cos_sin_cache")
    & rules.dtype("positions", torch.int64)
    & rules.ndim("positions", 1)
    & rules.contiguous("x_query", "x_key", "positions", "cos_sin_cache")
    & rules.custom(_fits, "the heads, the table and the head size do not fit"),
    traits={BATCH_INVARIANT, ROUNDS_LESS},
)
def rotary_embedding(
    x_query: Tensor, x_key: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return rotated queries and keys; the kernel writes over its inputs."""
    rows = len(cos_sin_cache)
    if positions.numel() and not -rows <= positions.min() <= positions.max() < rows:
        raise IndexError(f"a position is out of range for a table of {rows} rows")
    query, key = x_query.clone(), x_key.clone()
    # The kernel does not count negative positions from the end.
    positions = positions.where(positions >= 0, positions + rows)
    tokens = len(positions)
    heads = [x.view(tokens, x.numel() // tokens) if tokens else x for x in (query, key)]
    vllm_ops().rotary_embedding(positions, *heads, head_size, cos_sin_cache, is_neox_style)
    return query, key


# Mixture of experts.


_UNQUANTIZED = 0


def _has_whole_blocks(x: Tensor, w13: Tensor, w2: Tensor) -> bool:
    return w13.shape[0] > 0 and x.shape[1] % 32 == 0 and w2.shape[-1] % 32 == 0


@implements(
    ops.fused_experts,
    rules.cpu("x", "w13", "w2", "topk_weights", "topk_ids")
    & rules.dtype("x", torch.bfloat16)
    & rules.same_dtype("x", "w13", "w2")
    & rules.contiguous("x", "w13", "w2")
    & rules.one_of("activation", "silu")
    & rules.is_none("expert_map")
    & rules.is_none("w13_bias")
    & rules.is_none("w2_bias")
    & rules.one_of("apply_router_weight_on_input", False)
    & rules.custom(_has_whole_blocks, "the sizes must be multiples of 32"),
    traits={ROUNDS_LESS},
)
def fused_experts(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
    activation: str = "silu", expert_map: Tensor | None = None, w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None, apply_router_weight_on_input: bool = False,
    alpha: float | None = None, beta: float | None = None, limit: float | None = None,
) -> Tensor:  # fmt: skip
    """Return the weighted sum of the experts' outputs; each call packs the weights."""
    bound_activation(activation, alpha, beta, limit)
    check_experts(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    is_valid = (topk_ids >= 0) & (topk_ids < w13.shape[0])
    # The kernel has no tokens without an expert: those get the first one, with the weight 0.
    weights = torch.where(is_valid, topk_weights, 0).float().contiguous()
    experts = torch.where(is_valid, topk_ids, 0).int().contiguous()
    out = torch.empty_like(x)
    if x.shape[0] == 0:
        return out
    vllm_ops().fused_experts_cpu(
        out, x, w13, w2, weights, experts, _UNQUANTIZED, None, None, None, None, None, None,
        None, None, None, None, False,
    )  # fmt: skip
    return out


# State-space models: the scan, and the two steps of decoding.


_PADDING = -1


_SLOTS = (
    rules.cpu("x", "x_state", "slot_idx")
    & rules.dtype("slot_idx", torch.int32, torch.int64)
    & rules.contiguous("x", "x_state", "slot_idx")
)


def _slots(slot_idx: Tensor, count: int) -> Tensor:
    """Return the slots as int32; raise IndexError if one does not exist."""
    if slot_idx.shape[0] and not _PADDING <= slot_idx.min() <= slot_idx.max() < count:
        raise IndexError(f"a slot is out of range for a state of {count} slots")
    return slot_idx.int()


def _has_heads(x: Tensor, dt: Tensor, a: Tensor, b: Tensor) -> bool:
    return x.ndim == b.ndim == 3 and dt.ndim == 2 and a.ndim == 1


_MAX_STATES = 1024  # of a channel; the kernel adds them one by one, so more lose digits


@implements(
    ops.selective_state_update,
    _SLOTS
    & rules.dtype("x", torch.float32, torch.bfloat16)
    & rules.same_dtype("x", "dt", "b", "c", "z")
    & rules.dtype("x_state", torch.float32)
    & rules.contiguous("dt", "b", "c", "z")
    & rules.is_none("dt_min")
    & rules.is_none("dt_max")
    & rules.custom(_has_heads, "only one number per head for dt and a")
    & rules.custom(
        lambda x_state: x_state.shape[-1:] <= (_MAX_STATES,), f"more than {_MAX_STATES} states"
    ),
)
def selective_state_update(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, x_state: Tensor, slot_idx: Tensor, dt_softplus: bool = True,
    dt_min: float | None = None, dt_max: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Advance every sequence by one token; the kernel writes over its state."""
    check_scan("selective_state_update", x, dt, a, b, c, d, z, dt_bias, x_state)
    check_slots("selective_state_update", slot_idx, x.shape[0])
    _, heads, size, width = x_state.shape
    d, dt_bias = (
        None if t is None else t.float().reshape(heads, -1).expand(heads, size)
        for t in (d, dt_bias)
    )
    decay = a.float()[:, None, None].expand(heads, size, width)
    step = dt[:, :, None].expand_as(x)
    out, state = torch.zeros_like(x), x_state.clone()
    slots = _slots(slot_idx, x_state.shape[0])
    if x.shape[0] == 0:
        return out, state
    vllm_ops().selective_state_update_cpu(
        state, x, step, decay, b, c, d, z, dt_bias, dt_softplus, slots, None, _PADDING, out,
        None, None,
    )  # fmt: skip
    return out, state


@implements(
    ops.causal_conv1d_update,
    _SLOTS
    & rules.dtype("x", torch.float32, torch.bfloat16)
    & rules.same_dtype("x", "weight", "bias", "x_state")
    & rules.cpu("weight", "bias")
    & rules.contiguous("weight", "bias"),
)
def causal_conv1d_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_state: Tensor, slot_idx: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Convolve one new token of each sequence; the kernel writes over its inputs."""
    check_conv("causal_conv1d_update", x, weight, bias, x_state, activation)
    check_slots("causal_conv1d_update", slot_idx, x.shape[0])
    out, state = x.clone(), x_state.clone()
    slots = _slots(slot_idx, x_state.shape[0])
    if x.shape[0] == 0:
        return out, state
    out = vllm_ops().causal_conv1d_update_cpu_vec(
        out, state, weight, bias, activation, slots, None, _PADDING
    )
    return torch.where(slots[:, None] == _PADDING, 0, out), state


@implements(
    ops.ssd_chunk_scan,
    _SLOTS
    & rules.cpu("query_start_loc", "has_initial_state")
    & rules.dtype("x", torch.float32, torch.bfloat16)
    & rules.same_dtype("x", "b", "c", "z")
    & rules.contiguous("b", "c", "z"),
    traits=(),  # the last bits depend on the other sequences
)
def ssd_chunk_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, x_state: Tensor, query_start_loc: Tensor, slot_idx: Tensor,
    has_initial_state: Tensor, chunk_size: int = 256, dt_softplus: bool = True,
    dt_min: float | None = None, dt_max: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scan packed sequences; the kernel writes over copies of their initial states."""
    check_scan("ssd_chunk_scan", x, dt, a, b, c, d, z, dt_bias, x_state, chunk_size)
    check_sequences("ssd_chunk_scan", query_start_loc, slot_idx, has_initial_state)
    step = time_step(dt, dt_bias, dt_softplus, dt_min, dt_max, torch.float32).contiguous()
    states = initial_states(x_state, slot_idx, has_initial_state).float().contiguous()
    b, c = (t[:, None] if t.ndim == 2 else t for t in (b, c))
    skip = None if d is None else d.float().contiguous()
    out = torch.zeros_like(x)
    if x.shape[0] and slot_idx.shape[0]:
        vllm_ops().mamba_chunk_scan_fwd_cpu(
            out, states, x, step, a.float(), b, c, skip, z, query_start_loc.int()
        )
    sequence, _ = locate(x.shape[0], query_start_loc)
    out = torch.where(is_computed(sequence, slot_idx)[:, None, None], out, 0)
    return out, write_states(x_state, slot_idx, states)

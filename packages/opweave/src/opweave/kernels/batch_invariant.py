"""Provider ``batch_invariant``: applies the native definition to each row separately."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from opweave.ir import IrOp, ops, require, rules
from opweave.ir.ops.arguments import check_sequences, check_slots
from opweave.ir.ops.attention import check_attention, check_varlen
from opweave.ir.ops.conv import check_conv, check_patches, patches
from opweave.ir.ops.fused_experts import Routed, combine
from opweave.ir.ops.fused_experts_quant import PreparedExperts, low_bit_experts
from opweave.ir.ops.linear import scales_tokens
from opweave.ir.ops.mla_attention import absorb, check_decode
from opweave.ir.ops.paged_attention import check_tables
from opweave.ir.ops.state_space import check_scan
from opweave.ir.rules import BATCH_INVARIANT, DIFFERENTIABLE
from opweave.ir.schema import Function
from opweave.kernels.aten.experts import dense_experts, outputs_of
from opweave.kernels.aten.state_space import IN_PLACE, PACKED, own_slots, sequences
from opweave.kernels.wrap import opaque as opaque_in

# Opaque ops for loops over rows, which tracers would unroll and specialize on the batch size.


opaque = partial(opaque_in, namespace="opweave_rows")


# Call a function with one row at a time.


_T = TypeVar("_T")


def of_rows(function: Callable[..., _T], *tensors: Tensor) -> list[_T]:
    """Return the results of *function* for each row of *tensors*, which keeps its dimension.

    Rows are copied, because libraries choose the summation order by memory alignment.
    """
    rows = zip(*tensors, strict=True)
    return [function(*(part.clone()[None] for part in row)) for row in rows]


# Linear layers, norms and activations, one row at a time.


_TRAITS = {BATCH_INVARIANT, DIFFERENTIABLE}


def _each_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply *function* to each row; the result has the strides of *x*."""
    joined = _by_rows(function, x)
    if x.is_contiguous() or joined.shape[-1] == 0:
        return joined
    return torch.empty_like(x[..., : joined.shape[-1]]).copy_(joined)


def _by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.ndim < 2 or x.numel() == 0:
        return function(x)
    rows = of_rows(function, x.reshape(-1, x.shape[-1]))
    return torch.cat(rows).reshape(*x.shape[:-1], rows[0].shape[-1])


def _implements(
    op: IrOp, traits: set[str], rule: rules.Rule | None = None
) -> Callable[[Function], Function]:
    """Register the decorated function of the values of all parameters as an opaque op."""

    def decorate(function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*op.bind(*args, **kwargs))

        call.__signature__ = inspect.signature(op.native)  # type: ignore[attr-defined]
        op.register_impl("batch_invariant", traits=traits, supports_args=rule)(opaque(op)(call))
        return function

    return decorate


def _register_native(
    op: IrOp,
    apply: Callable[[Callable[[Tensor], Any], Tensor], Any],
    traits: set[str],
    rule: rules.Rule | None = None,
) -> None:
    """Register native, applied to the rows of the first argument by *apply*."""

    @_implements(op, traits, rule)
    def native_by_rows(x: Tensor, *rest: Any) -> Any:
        return apply(lambda row: op.native(row, *rest), x)


for _op in (ops.rms_norm, ops.silu_and_mul, ops.mul_and_silu):
    _register_native(_op, _each_row, _TRAITS)
for _op in (ops.linear_w4a16, ops.linear_q):
    _register_native(_op, _by_rows, _TRAITS)
# torch promotes the dtype of a bias only where it adds it to more than two dimensions.
_register_native(ops.linear, _by_rows, _TRAITS, rules.same_dtype("x", "weight", "bias"))


@_implements(ops.linear_w8a16, _TRAITS)
def linear_w8a16(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    weight = weight.contiguous()  # for a column-major weight, torch sums one by one in float32
    return _by_rows(lambda row: ops.linear_w8a16.native(row, weight, *rest), x)


@_implements(ops.linear_w8a8, _TRAITS)
def linear_w8a8(x: Tensor, x_scale: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    rest = weight.contiguous(), *rest
    if x.ndim < 2 or x.numel() == 0 or not scales_tokens(x_scale, x):
        out: Tensor = ops.linear_w8a8.native(x, x_scale, *rest)
        return out
    codes = x.reshape(-1, x.shape[-1])
    scales = x_scale if x_scale.ndim == x.ndim else x_scale.reshape(1)
    scales = scales.reshape(-1, scales.shape[-1]).expand(len(codes), -1)
    rows = of_rows(lambda row, one: ops.linear_w8a8.native(row, one, *rest), codes, scales)
    return torch.cat(rows).reshape(*x.shape[:-1], weight.shape[0])


@_implements(ops.gelu_and_mul, _TRAITS)
def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    # Expanding each row makes it non-contiguous, which avoids oneDNN, whose gelu(inf) is NaN.
    def alone(row: Tensor) -> Tensor:
        twice: Tensor = ops.gelu_and_mul.native(row.expand(2, *row.shape), approximate)
        return twice[0]

    return _each_row(alone, x)


# Attention, one query at a time: the result of a query depends only on its own keys.


_ATTENTION_TRAITS = {BATCH_INVARIANT}


def _register_dense_attention(op: IrOp, *, causal: bool) -> None:
    @_implements(op, _ATTENTION_TRAITS)
    def dense_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        check_attention(query, key, value, causal, window, op.name)
        out = query.new_zeros(*query.shape[:3], value.shape[-1])
        for i in range(query.shape[0]):
            _attend(out[i], query[i], key[i], value[i], scale, causal, window, soft_cap)
        return out


_register_dense_attention(ops.bidirectional_attention, causal=False)
_register_dense_attention(ops.causal_attention, causal=True)


@_implements(ops.varlen_attention, _ATTENTION_TRAITS)
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *options: Any
) -> Tensor:
    _, causal, window, _ = options
    check_varlen(query, key, value, cu_q, cu_k, causal, window)
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    for i in range(len(starts_q) - 1):
        q = slice(starts_q[i], starts_q[i + 1])
        k = slice(starts_k[i], starts_k[i + 1])
        _attend(out[q], query[q], key[k], value[k], *options)
    return out


@_implements(ops.mla_attention_decode, _ATTENTION_TRAITS)
def mla_attention_decode(
    query: Tensor,
    kv_cache: Tensor,
    kv_b_weight: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float | None,
) -> Tensor:
    latent, sizes = kv_b_weight.shape[-1], check_decode(query, kv_cache, kv_b_weight)
    check_tables(block_tables, seq_lens, cu_seqlens_q)
    absorbed, w_uv = absorb(query, kv_b_weight, sizes, _each_token)
    attended = query.new_zeros(*query.shape[:2], latent)
    starts, scale = cu_seqlens_q.tolist(), query.shape[2] ** -0.5 if scale is None else scale
    for i, keys in enumerate(seq_lens.tolist()):
        q = slice(starts[i], starts[i + 1])
        blocks = block_tables[i, : -(-keys // kv_cache.shape[1])]
        rows = kv_cache.index_select(0, blocks).flatten(0, 1)[:keys, None]
        _attend(attended[q], absorbed[q], rows, rows[..., :latent], scale, True, None, None)
    return _each_token("tnl,nvl->tnv", attended, w_uv)


def _each_token(equation: str, tokens: Tensor, weight: Tensor) -> Tensor:
    # Copy each row, because libraries choose the summation order by memory alignment.
    rows = [torch.einsum(equation, row.clone()[None], weight) for row in tokens]
    return torch.cat(rows) if rows else torch.einsum(equation, tokens, weight)


def _attend(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Compute attention for one sequence into *out*; all tensors are ``(length, heads, size)``."""
    for i in range(query.shape[0]):
        end = key.shape[0] - query.shape[0] + i + 1 if causal else key.shape[0]
        start = 0 if window is None else max(end - window, 0)
        if end > start:
            # Copies, as in _each_token.
            row = (t.clone()[None] for t in (query[i : i + 1], key[start:end], value[start:end]))
            out[i] = ops.causal_attention.native(*row, scale, None, soft_cap)[0, 0]


# Convolutions, one image at a time.


@_implements(ops.conv_nd, _TRAITS)
def conv_nd(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return _each_image(lambda image: ops.conv_nd.native(image, weight, *rest), x, weight.ndim)


@_implements(ops.patch_matmul, _TRAITS)
def patch_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    check_patches(x, weight)

    def product(image: Tensor) -> Tensor:
        rows: Tensor = ops.linear.native(patches(image, weight.shape[2:]), weight.flatten(1), bias)
        return rows

    return _each_image(product, x, weight.ndim).movedim(-1, 1)


def _each_image(function: Callable[[Tensor], Tensor], x: Tensor, ndim: int) -> Tensor:
    if x.ndim != ndim or x.shape[0] == 0:
        return function(x)
    # Copy each image, because libraries choose the summation order by memory alignment.
    return torch.cat([function(image.clone()) for image in torch.split_with_sizes(x, [1] * len(x))])


# Mixture of experts, with batch-invariant ops for each expert.


_EXPERTS_TRAITS = {BATCH_INVARIANT}


def _register_experts(op: IrOp, prepare: Callable[..., PreparedExperts]) -> None:
    @_implements(op, _EXPERTS_TRAITS)
    def mixture(*arguments: Any) -> Tensor:
        experts = prepare(*arguments)
        # Inner ops must be batch-invariant even if the caller does not require it, so that the
        # result is the same in both cases.
        with require(BATCH_INVARIANT):
            if experts.act is not ops.silu_and_mul:
                experts = experts._replace(act=partial(_each, experts.act))
            return _combined(outputs_of(experts), experts.routed)


_register_experts(ops.fused_experts, dense_experts)
_register_experts(ops.fused_experts_quant, low_bit_experts)


def _each(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return _concatenated(lambda row: (function(row),), x)[0]


def _combined(outputs: Tensor, routed: Routed) -> Tensor:
    def row(outputs: Tensor, valid: Tensor, weights: Tensor | None = None) -> tuple[Tensor]:
        return (combine(outputs, routed._replace(valid=valid, weights=weights)),)

    weights = () if routed.weights is None else (routed.weights,)
    return _concatenated(row, outputs, routed.valid, *weights)[0]


def _routed(
    route: Callable[[Tensor], tuple[Tensor, Tensor]], logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Call *route* with each row of *logits*, or once for an invalid shape, so that it raises."""
    weights, ids = _concatenated(route, logits) if logits.ndim == 2 else route(logits)
    return weights, ids


def _concatenated(
    function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Call *function* with each row of *tensors*, and concatenate the results."""
    if tensors[0].ndim == 0 or tensors[0].shape[0] < 2:
        return function(*tensors)  # raises for an invalid shape
    results = of_rows(function, *tensors)
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


_register_native(ops.moe_sum, _each, _EXPERTS_TRAITS)
for _op in (ops.topk_softmax, ops.topk_sigmoid, ops.topk_sqrtsoftplus, ops.grouped_topk):
    _register_native(_op, _routed, _EXPERTS_TRAITS)


# Causal convolutions and state-space scans, one sequence at a time.
#
# Each sequence is computed from copies, so that its result depends neither on the other
# sequences nor on the memory alignment of its tokens and state.


_PER_TOKEN = ("x", "dt", "b", "c", "z")
_SEQUENCES = ("query_start_loc", "slot_idx", "has_initial_state")


def _register_sequences(op: IrOp, check: Callable[..., None]) -> None:
    packed = "query_start_loc" in op.schema.names
    one = op.impls["aten"].impl_fn
    checked = [name for name in inspect.signature(check).parameters if name in op.schema.names]
    traits = {BATCH_INVARIANT}
    fits = PACKED if packed else IN_PLACE

    @op.register_impl("batch_invariant", supports_args=fits, inplace=True, traits=traits)
    @functools.wraps(op.native)
    def alone(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        call = dict(zip(op.schema.names, op.bind(*args, **kwargs), strict=True))
        check(op.name, **{name: call[name] for name in checked})
        x, x_state = call["x"], call["x_state"]
        if packed:
            check_sequences(op.name, *(call[name] for name in _SEQUENCES))
        else:
            check_slots(op.name, call["slot_idx"], x.shape[0])
        tokens = {name: call[name] for name in _PER_TOKEN if call.get(name) is not None}
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        for rows, slot, indices in _sequences(packed, call):
            state = x_state[slot : slot + 1].clone()
            part = {name: t[rows].clone() for name, t in tokens.items()}
            out[rows], new = one(**{**call, **part, **indices, "x_state": state})
            x_state[slot] = new[0]
        return out, x_state


def _sequences(
    packed: bool, call: dict[str, Tensor]
) -> Iterator[tuple[slice, int, dict[str, Tensor]]]:
    """Yield each sequence's tokens, its slot, and the index arguments for a call with it alone."""
    slot_idx = call["slot_idx"]
    slots, first = own_slots(call["x_state"].shape[0], slot_idx), torch.zeros_like(slot_idx[:1])
    if not packed:
        for i, slot in enumerate(slots):
            if slot >= 0:
                yield slice(i, i + 1), slot, {"slot_idx": first}
        return
    starts, has_states = call["query_start_loc"], call["has_initial_state"]
    for rows, slot, has_state in sequences(starts, slots, has_states):
        ends = starts.new_tensor([0, rows.stop - rows.start])
        flag = has_states.new_tensor([has_state])
        yield rows, slot, {"slot_idx": first, "query_start_loc": ends, "has_initial_state": flag}


for _op in (ops.causal_conv1d, ops.causal_conv1d_update):
    _register_sequences(_op, check_conv)
for _op in (ops.selective_scan, ops.selective_state_update, ops.ssd_chunk_scan):
    _register_sequences(_op, check_scan)

"""Causal convolution and state-space scans, one sequence at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.ir.ops.arguments import check_sequences, check_slots
from opweave.ir.ops.conv import check_conv, conv_step, convolve
from opweave.ir.ops.ssd import grouped, read_out, scan_chunks
from opweave.ir.ops.state_space import by_channel, check_scan, finish, scan_step, time_step

# Read the tokens and state slots of sequences on the host.


# The state must be contiguous, because it is returned, and native returns a contiguous tensor.
IN_PLACE = rules.contiguous("x_state") & rules.has_values("slot_idx")
"""The rules of kernels with one slot per token that update the state in-place."""

PACKED = IN_PLACE & rules.has_values("query_start_loc", "has_initial_state")
"""The rules of kernels that also read the boundaries of packed sequences."""


def own_slots(count: int, slot_idx: Tensor) -> list[int]:
    """Return the slot of each sequence, -1 for padding.

    Raises:
        IndexError: a slot is out of range.
    """
    _check(count, slot_idx)
    slots: list[int] = slot_idx.tolist()
    return slots


def sequences(
    query_start_loc: Tensor, slots: list[int], has_initial_state: Tensor
) -> Iterator[tuple[slice, int, bool]]:
    """Yield (tokens, slot, has initial state) for each sequence that is not padding."""
    starts, has_states = query_start_loc.tolist(), has_initial_state.tolist()
    for i, slot in enumerate(slots):
        if slot >= 0:
            yield slice(starts[i], starts[i + 1]), slot, has_states[i]


def padded_slots(count: int, slot_idx: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that are not padding, and their slots, both int64.

    Raises:
        IndexError: a slot is out of range.
    """
    _check(count, slot_idx)
    rows = (slot_idx >= 0).nonzero()[:, 0]
    return rows, slot_idx[rows].long()


def _check(count: int, slot_idx: Tensor) -> None:
    # Reads values first: a tracer stops here, before it specializes on the number of slots.
    outside = (slot_idx < -1) | (slot_idx >= count)
    if outside.any():
        slots = slot_idx[outside].tolist()
        raise IndexError(f"slots {slots} are out of range: there are {count} slots, and -1 pads.")


# Causal convolution, one sequence at a time, with in-place updates of the states.
#
# The sequence boundaries are read on the host, so this cannot be traced: compiled code calls it
# as an opaque op, and calls that need gradients use native.


@ops.causal_conv1d.register_impl("aten", supports_args=PACKED, inplace=True)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_state: Tensor,
    query_start_loc: Tensor,
    slot_idx: Tensor,
    has_initial_state: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    check_conv("causal_conv1d", x, weight, bias, x_state, activation)
    check_sequences("causal_conv1d", query_start_loc, slot_idx, has_initial_state)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    dtype = torch.promote_types(x.dtype, torch.float32)
    taps, history = weight.to(dtype), weight.shape[1] - 1
    slots = own_slots(x_state.shape[0], slot_idx)
    for tokens, slot, has_state in sequences(query_start_loc, slots, has_initial_state):
        state, new = x_state[slot], x[tokens].to(dtype)
        before = state.to(dtype).T if has_state else new.new_zeros(history, x.shape[1])
        inputs, length = torch.cat((before, new)), new.shape[0]
        shifted = [inputs[j : j + length] for j in range(history + 1)]
        out[tokens] = convolve(shifted, taps, bias, activation)
        state.copy_(inputs[length:].T)
    return out, x_state


@ops.causal_conv1d_update.register_impl("aten", supports_args=IN_PLACE, inplace=True)
def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_state: Tensor,
    slot_idx: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    check_conv("causal_conv1d_update", x, weight, bias, x_state, activation)
    check_slots("causal_conv1d_update", slot_idx, x.shape[0])
    rows, slots = padded_slots(x_state.shape[0], slot_idx)
    y, inputs = conv_step(x[rows], weight, bias, x_state[slots], activation)
    x_state[slots] = inputs.to(x_state.dtype)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    out[rows] = y
    return out, x_state


# State-space scans, one sequence at a time, with in-place updates of the states.
#
# The sequence boundaries are read on the host, so this cannot be traced: compiled code calls it
# as an opaque op, and calls that need gradients use native.


_BLOCK = 32  # tokens whose gates and inputs are computed at once; small enough for the CPU cache


@ops.selective_scan.register_impl("aten", supports_args=PACKED, inplace=True)
def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, x_state: Tensor, query_start_loc: Tensor, slot_idx: Tensor,
    has_initial_state: Tensor, dt_softplus: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_scan("selective_scan", x, dt, a, b, c, d, z, dt_bias, x_state)
    check_sequences("selective_scan", query_start_loc, slot_idx, has_initial_state)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    dtype = torch.promote_types(x.dtype, torch.float32)
    rates, slots = a.to(dtype), own_slots(x_state.shape[0], slot_idx)
    for tokens, slot, has_state in sequences(query_start_loc, slots, has_initial_state):
        state = x_state[slot]
        h = state.to(dtype) if has_state else torch.zeros_like(state, dtype=dtype)
        for start in range(tokens.start, tokens.stop, _BLOCK):
            block = slice(start, min(start + _BLOCK, tokens.stop))
            u = x[block].to(dtype)
            step = time_step(dt[block], dt_bias, dt_softplus, None, None, dtype)
            gate = torch.exp(step[..., None] * rates)
            h_of = (step * u)[..., None] * by_channel(b[block].to(dtype), x.shape[1])
            for i in range(h_of.shape[0]):
                h = h_of[i].addcmul_(gate[i], h)
            y = (h_of * by_channel(c[block].to(dtype), x.shape[1])).sum(-1)
            out[block] = finish(y, u, d, None if z is None else z[block])
        state.copy_(h)
    return out, x_state


@ops.selective_state_update.register_impl("aten", supports_args=IN_PLACE, inplace=True)
def selective_state_update(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, x_state: Tensor, slot_idx: Tensor, dt_softplus: bool = True,
    dt_min: float | None = None, dt_max: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_scan("selective_state_update", x, dt, a, b, c, d, z, dt_bias, x_state)
    check_slots("selective_state_update", slot_idx, x.shape[0])
    rows, slots = padded_slots(x_state.shape[0], slot_idx)
    gate = None if z is None else z[rows]
    limits = (dt_softplus, dt_min, dt_max)
    y, h = scan_step(
        x[rows], dt[rows], a, b[rows], c[rows], d, gate, dt_bias, x_state[slots], *limits
    )
    x_state[slots] = h.to(x_state.dtype)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    out[rows] = y
    return out, x_state


@ops.ssd_chunk_scan.register_impl("aten", supports_args=PACKED, inplace=True)
def ssd_chunk_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, x_state: Tensor, query_start_loc: Tensor, slot_idx: Tensor,
    has_initial_state: Tensor, chunk_size: int = 256, dt_softplus: bool = True,
    dt_min: float | None = None, dt_max: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_scan("ssd_chunk_scan", x, dt, a, b, c, d, z, dt_bias, x_state, chunk_size)
    check_sequences("ssd_chunk_scan", query_start_loc, slot_idx, has_initial_state)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    dtype = torch.promote_types(x.dtype, torch.float32)
    b, c, d = grouped(b), grouped(c), None if d is None else d[:, None]
    slots = own_slots(x_state.shape[0], slot_idx)
    for tokens, slot, has_state in sequences(query_start_loc, slots, has_initial_state):
        state = x_state[slot]
        h = state.to(dtype)[None] if has_state else torch.zeros_like(state, dtype=dtype)[None]
        for start in range(tokens.start, tokens.stop, chunk_size):
            chunk = slice(start, min(start + chunk_size, tokens.stop))
            u = x[chunk].to(dtype)
            step = time_step(dt[chunk], dt_bias, dt_softplus, dt_min, dt_max, dtype)
            decay, inputs = step * a.to(dtype), u * step[..., None]
            keys, queries = b[chunk].to(dtype)[None], c[chunk].to(dtype)[None]
            y, end, total = scan_chunks(decay[None], inputs[None], keys, queries)
            y = (y + read_out(h, queries, decay[None]))[0]
            out[chunk] = finish(y, u, d, None if z is None else z[chunk])
            h = torch.exp(total)[..., None, None] * h + end
        state.copy_(h[0])
    return out, x_state

"""State-space scans, one sequence at a time, with in-place updates of the states.

The sequence boundaries are read on the host, so this cannot be traced: compiled code calls it as an
opaque op, and calls that need gradients use native.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops
from opweave.ir.ops.selective_scan import by_channel, check_scan, finish, time_step
from opweave.ir.ops.selective_state_update import check_update, scan_step
from opweave.ir.ops.ssd import check_ssd, grouped, read_out, scan_chunks
from opweave.ir.ops.state_slots import check_sequences
from opweave.kernels.aten.state_slots import IN_PLACE, PACKED, own_slots, padded_slots, sequences

_BLOCK = 32  # tokens whose gates and inputs are computed at once; small enough for the CPU cache


@ops.selective_scan.register_impl("aten", supports_args=PACKED, inplace=True)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    x_state: Tensor,
    query_start_loc: Tensor,
    slot_idx: Tensor,
    has_initial_state: Tensor,
    dt_softplus: bool = True,
) -> tuple[Tensor, Tensor]:
    check_scan(x, dt, a, b, c, d, z, dt_bias, x_state)
    check_sequences("selective_scan", query_start_loc, slot_idx, has_initial_state)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    dtype = torch.promote_types(x.dtype, torch.float32)
    rates, own = a.to(dtype), own_slots(x_state.shape[0], slot_idx)
    for tokens, slot, known in sequences(query_start_loc, own, has_initial_state):
        state = x_state[slot]
        h = state.to(dtype) if known else torch.zeros_like(state, dtype=dtype)
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
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    x_state: Tensor,
    slot_idx: Tensor,
    dt_softplus: bool = True,
    dt_min: float | None = None,
    dt_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    check_update(x, dt, a, b, c, d, z, dt_bias, x_state, slot_idx)
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
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    x_state: Tensor,
    query_start_loc: Tensor,
    slot_idx: Tensor,
    has_initial_state: Tensor,
    chunk_size: int = 256,
    dt_softplus: bool = True,
    dt_min: float | None = None,
    dt_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    check_ssd(x, dt, a, b, c, d, z, dt_bias, x_state, chunk_size)
    check_sequences("ssd_chunk_scan", query_start_loc, slot_idx, has_initial_state)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    dtype = torch.promote_types(x.dtype, torch.float32)
    b, c, d = grouped(b), grouped(c), None if d is None else d[:, None]
    own = own_slots(x_state.shape[0], slot_idx)
    for tokens, slot, known in sequences(query_start_loc, own, has_initial_state):
        state = x_state[slot]
        h = state.to(dtype)[None] if known else torch.zeros_like(state, dtype=dtype)[None]
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

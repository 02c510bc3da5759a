"""State-space models: the scan, and the two steps of decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.ir.ops.attention import locate
from opweave.ir.ops.causal_conv import check_conv
from opweave.ir.ops.selective_scan import time_step
from opweave.ir.ops.selective_state_update import check_update
from opweave.ir.ops.ssd import check_ssd
from opweave.ir.ops.state_slots import (
    check_sequences,
    check_slots,
    initial_states,
    is_computed,
    write_states,
)
from opweave.kernels.vllm_c import library

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


@library.implements(
    ops.selective_state_update,
    _SLOTS
    & rules.dtype("x", torch.float32, torch.bfloat16)
    & rules.same_dtype("x", "dt", "b", "c", "z")
    & rules.dtype("x_state", torch.float32)
    & rules.contiguous("dt", "b", "c", "z")
    & rules.is_none("dt_min")
    & rules.is_none("dt_max")
    & rules.custom(_has_heads, "only one number per head for dt and a"),
)
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
    """Advance every sequence by one token; the kernel writes over its state."""
    check_update(x, dt, a, b, c, d, z, dt_bias, x_state, slot_idx)
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
    library.ops().selective_state_update_cpu(
        state, x, step, decay, b, c, d, z, dt_bias, dt_softplus, slots, None, _PADDING, out,
        None, None,
    )  # fmt: skip
    return out, state


@library.implements(
    ops.causal_conv1d_update,
    _SLOTS
    & rules.dtype("x", torch.float32, torch.bfloat16)
    & rules.same_dtype("x", "weight", "bias", "x_state")
    & rules.cpu("weight", "bias")
    & rules.contiguous("weight", "bias"),
)
def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_state: Tensor,
    slot_idx: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve one new token of each sequence; the kernel writes over its inputs."""
    check_conv("causal_conv1d_update", x, weight, bias, x_state, activation)
    check_slots("causal_conv1d_update", slot_idx, x.shape[0])
    out, state = x.clone(), x_state.clone()
    slots = _slots(slot_idx, x_state.shape[0])
    if x.shape[0] == 0:
        return out, state
    out = library.ops().causal_conv1d_update_cpu_vec(
        out, state, weight, bias, activation, slots, None, _PADDING
    )
    return torch.where(slots[:, None] == _PADDING, 0, out), state


@library.implements(
    ops.ssd_chunk_scan,
    _SLOTS
    & rules.cpu("query_start_loc", "has_initial_state")
    & rules.dtype("x", torch.float32, torch.bfloat16)
    & rules.same_dtype("x", "b", "c", "z")
    & rules.contiguous("b", "c", "z"),
    traits=(),  # the last bits depend on the other sequences
)
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
    """Scan packed sequences; the kernel writes over copies of their initial states."""
    check_ssd(x, dt, a, b, c, d, z, dt_bias, x_state, chunk_size)
    check_sequences("ssd_chunk_scan", query_start_loc, slot_idx, has_initial_state)
    step = time_step(dt, dt_bias, dt_softplus, dt_min, dt_max, torch.float32).contiguous()
    states = initial_states(x_state, slot_idx, has_initial_state).float().contiguous()
    b, c = (t[:, None] if t.ndim == 2 else t for t in (b, c))
    skip = None if d is None else d.float().contiguous()
    out = torch.zeros_like(x)
    if x.shape[0] and slot_idx.shape[0]:
        library.ops().mamba_chunk_scan_fwd_cpu(
            out, states, x, step, a.float(), b, c, skip, z, query_start_loc.int()
        )
    sequence, _ = locate(x.shape[0], query_start_loc)
    out = torch.where(is_computed(sequence, slot_idx)[:, None, None], out, 0)
    return out, write_states(x_state, slot_idx, states)

"""Decode steps of state-space models: the convolution, and the update of the state."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.ir.ops.causal_conv import check_conv
from opweave.ir.ops.selective_state_update import check_update
from opweave.ir.ops.state_slots import check_slots
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

"""Causal convolution, one sequence at a time, with in-place updates of the states.

The sequence boundaries are read on the host, so this cannot be traced: compiled code calls it as an
opaque op, and calls that need gradients use native.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops
from opweave.ir.ops.causal_conv import check_conv, conv_step, convolve
from opweave.ir.ops.state_slots import check_sequences, check_slots
from opweave.kernels.aten.state_slots import IN_PLACE, PACKED, own_slots, padded_slots, sequences


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
    own = own_slots(x_state.shape[0], slot_idx)
    for tokens, slot, known in sequences(query_start_loc, own, has_initial_state):
        state, new = x_state[slot], x[tokens].to(dtype)
        before = state.to(dtype).T if known else new.new_zeros(history, x.shape[1])
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

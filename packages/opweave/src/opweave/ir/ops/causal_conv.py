"""Short causal depthwise convolution with a state.

The state is ``(slots, channels, width - 1)``: the last inputs of each channel, the latest last.

Source: the convolution before the scan of Mamba, Gu and Dao, arXiv:2312.00752, section 3.4.
"""

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.ops.attention import locate
from opweave.ir.ops.checks import check_shape, misfit
from opweave.ir.ops.state_slots import (
    check_sequences,
    check_slots,
    initial_states,
    is_computed,
    read_states,
    sequence_inputs,
    some_slots,
    write_states,
)
from opweave.ir.registry import register_op

_ACTIVATIONS = ("silu", "swish")


@register_op(allow_inplace=True, autocast=False)
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
    """Depthwise convolution of packed sequences: ``y[t] = Σ w[j] x[t-K+1+j] + b``.

    The inputs before the first token of a sequence come from its slot if it *has_initial_state*,
    else they are zeros. Sums are in float32 (float64 stays), rounded once. Tokens after the last
    sequence and of sequences with slot -1 give zeros. Sequences must not share a slot.

    Args:
        x: ``(tokens, channels)``, floating point.
        weight: ``(channels, K)``, any floating dtype.
        bias: ``(channels,)`` or None.
        x_state: ``(slots, channels, K - 1)``, any floating dtype.
        query_start_loc: ``(sequences + 1,)``, integer, non-decreasing, from 0.
        slot_idx: ``(sequences,)``, integer: the slot of each sequence; -1 for padding.
        has_initial_state: ``(sequences,)``, bool.
        activation: ``"silu"`` (or ``"swish"``, its other name), applied to the result, or None.

    Returns:
        The result in the shape and dtype of ``x``, and the updated ``x_state``.

    Raises:
        ValueError: shapes or dtypes do not fit, or *activation* is unknown.
        IndexError: a slot does not exist.
    """
    check_conv("causal_conv1d", x, weight, bias, x_state, activation)
    check_sequences("causal_conv1d", query_start_loc, slot_idx, has_initial_state)
    tokens, count, history = x.shape[0], slot_idx.shape[0], weight.shape[1] - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    sequence, _ = locate(tokens, query_start_loc)
    known = initial_states(x_state, slot_idx, has_initial_state).to(dtype).transpose(1, 2)
    # Lay out the inputs of each sequence after its initial state, so that an output is a sum over
    # neighbors. Tokens after the last sequence follow unused space.
    places = torch.arange(tokens, device=x.device) + (sequence + 1) * history
    earlier = _windows(query_start_loc[:-1], count, history)
    inputs = x.new_zeros(tokens + (count + 1) * history, x.shape[1], dtype=dtype)
    inputs = inputs.index_copy(0, places, x.to(dtype))
    inputs = inputs.index_copy(0, earlier.flatten(), known.flatten(0, 1))
    length = tokens + count * history
    taps = [inputs[j : j + length] for j in range(history + 1)]
    y = convolve(taps, weight.to(dtype), bias, activation)[places - history]
    y = torch.where(is_computed(sequence, slot_idx)[:, None], y, 0).to(x.dtype)
    last = inputs[_windows(query_start_loc[1:], count, history)].transpose(1, 2)
    return y, write_states(x_state, slot_idx, last)


@register_op(allow_inplace=True, autocast=False)
def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_state: Tensor,
    slot_idx: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``causal_conv1d`` for decoding: one new token for each sequence.

    Args:
        x: ``(sequences, channels)``, floating point.
        weight, bias, x_state, activation: as in ``causal_conv1d``.
        slot_idx: ``(sequences,)``, integer; -1 for padding, whose result is zeros.

    Returns:
        The result in the shape and dtype of ``x``, and the updated ``x_state``.

    Raises:
        ValueError: shapes or dtypes do not fit, or *activation* is unknown.
        IndexError: a slot does not exist.
    """
    check_conv("causal_conv1d_update", x, weight, bias, x_state, activation)
    check_slots("causal_conv1d_update", slot_idx, x.shape[0])
    y, inputs = conv_step(x, weight, bias, read_states(x_state, slot_idx), activation)
    y = torch.where(slot_idx[:, None] >= 0, y, 0).contiguous()
    return y, write_states(x_state, slot_idx, inputs)


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Return the results of one token per sequence, and the new states."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    inputs = torch.cat((state.to(dtype), x.to(dtype)[..., None]), -1)
    y = convolve(list(inputs.unbind(-1)), weight.to(dtype), bias, activation)
    return y.to(x.dtype), inputs[..., 1:]


def convolve(
    taps: list[Tensor], weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Return ``act(Σ weight[:, j] * taps[j] + bias)``, summed in a fixed order."""
    y = taps[0] * weight[:, 0]
    for j, inputs in enumerate(taps[1:], start=1):
        y = y + inputs * weight[:, j]
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y if activation is None else functional.silu(y)


def check_conv(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_state: Tensor,
    activation: str | None,
) -> None:
    """Raise ValueError unless the arguments of a convolution called *op* fit together."""
    check_shape(op, "x", x, -1, -1)
    channels = x.shape[1]
    check_shape(op, "weight", weight, channels, -1)
    if weight.shape[1] == 0:
        raise misfit(op, "weight", weight, f"({channels}, K) with K of at least 1")
    check_shape(op, "x_state", x_state, -1, channels, weight.shape[1] - 1)
    if bias is not None:
        check_shape(op, "bias", bias, channels)
    if activation is not None and activation not in _ACTIVATIONS:
        raise ValueError(
            f"{op}: activation must be None or one of {', '.join(_ACTIVATIONS)}; found "
            f"{activation!r}."
        )


def _windows(ends: Tensor, count: int, history: int) -> Tensor:
    """Return the places of the *history* inputs before each of *ends*, ``(sequences, history)``."""
    offsets = torch.arange(history, device=ends.device)
    sequence = torch.arange(count, device=ends.device)
    return (ends + sequence * history)[:, None] + offsets


@causal_conv1d.register_input_generator
def _conv_inputs(
    num_tokens: int = 8,
    hidden_size: int = 24,
    width: int = 4,
    num_seqs: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, str]:
    """Make packed sequences; every second one has an initial state."""
    x, weight, bias, *_ = _update_inputs(num_tokens, hidden_size, width, dtype, device)
    state = torch.randn(num_seqs + 2, hidden_size, width - 1, device=device).to(dtype)
    return x, weight, bias, state, *sequence_inputs(num_tokens, num_seqs, device), "silu"


@causal_conv1d_update.register_input_generator
def _update_inputs(
    num_tokens: int = 8,
    hidden_size: int = 24,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, str]:
    """Make one token for each of *num_tokens* sequences; the first quarter is padding."""
    slots = some_slots(num_tokens, device)
    return (
        torch.randn(num_tokens, hidden_size, device=device).to(dtype),
        torch.randn(hidden_size, width, device=device).to(dtype) / width**0.5,
        torch.randn(hidden_size, device=device).to(dtype),
        torch.randn(num_tokens + 4, hidden_size, width - 1, device=device).to(dtype),
        slots,
        "silu",
    )


for _op in (causal_conv1d, causal_conv1d_update):
    # A few products summed in a different order, rounded once; values are of order one.
    _op.override_tolerance(torch.float32, atol=1e-5, rtol=1e-5)
    _op.override_tolerance(torch.bfloat16, atol=1e-2, rtol=1.6e-2)
    _op.override_tolerance(torch.float16, atol=2e-3, rtol=2e-3)

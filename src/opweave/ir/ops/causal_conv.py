"""Short causal convolution over each channel, with a state: its last inputs.

A state is ``(slots, channels, width - 1)``: for each channel its last inputs, the latest last.

Source: the convolution before the scan of Mamba, Gu and Dao, arXiv:2312.00752, section 3.4.
"""

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.ops.attention import locate
from opweave.ir.ops.state_slots import (
    check_sequences,
    check_shape,
    check_slots,
    initial_states,
    is_computed,
    misfit,
    read_states,
    sequence_inputs,
    some_slots,
    write_states,
)
from opweave.ir.registry import register_op

_ACTIVATIONS = ("silu", "swish")


@register_op(allow_inplace=True)
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
    """Convolve packed sequences, each channel with its own taps: ``y[t] = Σ w[j] x[t-K+1+j] + b``.

    Before the first token of a sequence are the inputs in its slot if it *has_initial_state*, else
    zeros. Sums are in float32 (float64 stays), rounded once. Tokens after the last sequence, and
    those of a sequence with slot -1, give zeros. Two sequences must not have one slot.

    Args:
        x: ``(tokens, channels)``, floating point.
        weight: ``(channels, K)``, any floating dtype.
        bias: ``(channels,)`` or None.
        x_state: ``(slots, channels, K - 1)``, any floating dtype.
        query_start_loc: ``(sequences + 1,)``, integer, non-decreasing, from 0.
        slot_idx: ``(sequences,)``, integer: where each state is; -1 for padding.
        has_initial_state: ``(sequences,)``, bool.
        activation: of the result: ``"silu"``, which is also called ``"swish"``, or None.

    Returns:
        The result in the shape and dtype of ``x``, and the states after the sequences' tokens.

    Raises:
        ValueError: shapes or dtypes do not fit, or *activation* is not known.
        IndexError: there is no such slot.
    """
    check_conv("causal_conv1d", x, weight, bias, x_state, activation)
    check_sequences("causal_conv1d", query_start_loc, slot_idx, has_initial_state)
    tokens, count, history = x.shape[0], slot_idx.shape[0], weight.shape[1] - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    sequence, _ = locate(tokens, query_start_loc)
    known = initial_states(x_state, slot_idx, has_initial_state).to(dtype).transpose(1, 2)
    # All inputs in one row, those of a sequence after what it knows; then an output is a sum of
    # neighbours. Tokens after the last sequence follow room that nobody reads.
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


@register_op(allow_inplace=True)
def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_state: Tensor,
    slot_idx: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``causal_conv1d`` of sequences with one new token each, which follows their state.

    Args:
        x: ``(sequences, channels)``, floating point.
        weight, bias, x_state, activation: as in ``causal_conv1d``.
        slot_idx: ``(sequences,)``, integer; -1 for padding, whose result is zeros.

    Returns:
        The result in the shape and dtype of ``x``, and the states with the new inputs.

    Raises:
        ValueError: shapes or dtypes do not fit, or *activation* is not known.
        IndexError: there is no such slot.
    """
    check_conv("causal_conv1d_update", x, weight, bias, x_state, activation)
    check_slots("causal_conv1d_update", slot_idx, x.shape[0])
    y, inputs = conv_step(x, weight, bias, read_states(x_state, slot_idx), activation)
    y = torch.where(slot_idx[:, None] >= 0, y, 0).contiguous()
    return y, write_states(x_state, slot_idx, inputs)


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Return the results of one token for each sequence, and the sequences' new states."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    inputs = torch.cat((state.to(dtype), x.to(dtype)[..., None]), -1)
    y = convolve(list(inputs.unbind(-1)), weight.to(dtype), bias, activation)
    return y.to(x.dtype), inputs[..., 1:]


def convolve(
    taps: list[Tensor], weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Return ``act(Σ weight[:, j] * taps[j] + bias)``; one order of sums, so bits are the same."""
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
            f"{op}: activation={activation!r} is none of None, {', '.join(_ACTIVATIONS)}."
        )


def _windows(ends: Tensor, count: int, history: int) -> Tensor:
    """Return where the *history* inputs before each of *ends* are: ``(sequences, history)``."""
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
    """Sequences that begin and that continue, one after the other."""
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
    """One token for each of as many sequences, the first of which is padding if they are some."""
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
    # A few products in another order, rounded once; values have magnitude about one.
    _op.override_tolerance(torch.float32, atol=1e-5, rtol=1e-5)
    _op.override_tolerance(torch.bfloat16, atol=1e-2, rtol=1.6e-2)
    _op.override_tolerance(torch.float16, atol=2e-3, rtol=2e-3)

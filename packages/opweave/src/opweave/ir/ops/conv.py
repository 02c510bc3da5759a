"""Convolutions: of images, of patches, and the causal depthwise convolution with a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.ops import arguments
from opweave.ir.ops.attention import locate
from opweave.ir.ops.linear import linear
from opweave.ir.registry import register_op

# Convolutions, and the convolution over separate patches as a matrix product.


_CONV: dict[int, Callable[..., Tensor]] = {
    1: functional.conv1d,
    2: functional.conv2d,
    3: functional.conv3d,
}
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


@register_op
def conv_nd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """Cross-correlation in 1, 2 or 3 dimensions, as in ``torch.nn.Conv1d`` to ``Conv3d``.

    Args:
        x: ``(batch, in_channels, *size)`` or ``(in_channels, *size)``.
        weight: ``(out_channels, in_channels / groups, *kernel)``, the dtype of ``x``.
        bias: ``(out_channels,)`` or None.
        stride, dilation: one number per dimension of the kernel.
        padding: two numbers per dimension, in order: before and after.
        groups: number of channel groups.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.

    Returns:
        ``(batch, out_channels, *positions)`` in the dtype of ``x``; no batch if ``x`` has none.

    Raises:
        ValueError: the kernel does not have 1 to 3 dimensions, an option has the wrong number of
            values, or *padding_mode* is unknown.
    """
    dims = weight.ndim - 2
    if dims not in _CONV:
        raise ValueError(
            f"conv_nd: weight must have 3 to 5 dimensions (1 to 3 of the kernel); found {dims + 2}."
        )
    if (len(stride), len(padding), len(dilation)) != (dims, 2 * dims, dims):
        raise ValueError(
            f"conv_nd: a kernel of {dims} dimensions needs {dims} values of stride and dilation, "
            f"and {2 * dims} of padding; found stride={list(stride)}, dilation={list(dilation)}, "
            f"padding={list(padding)}."
        )
    if padding_mode not in PADDING_MODES:
        raise ValueError(
            f"conv_nd: padding_mode must be one of {', '.join(PADDING_MODES)}; found "
            f"{padding_mode!r}."
        )
    before, after = list(padding[::2]), list(padding[1::2])
    if padding_mode != "zeros" or before != after:
        pairs = zip(before[::-1], after[::-1], strict=True)  # torch pads the last dimension first
        mode = "constant" if padding_mode == "zeros" else padding_mode
        x = functional.pad(x, [n for pair in pairs for n in pair], mode=mode)
        before = [0] * dims
    return _CONV[dims](x, weight, bias, list(stride), before, list(dilation), groups)


@register_op(composite=True)
def patch_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolution with a stride equal to the kernel size, as a matrix product over patches.

    A composite of ``linear``. Elements after the last whole patch are ignored.

    Args:
        x: ``(batch, in_channels, *size)``.
        weight: ``(out_channels, in_channels, *kernel)``, the dtype of ``x``.
        bias: ``(out_channels,)`` or None.

    Returns:
        ``(batch, out_channels, *patches)`` in the dtype of ``x``; channels are innermost in memory.

    Raises:
        ValueError: ``x`` and ``weight`` differ in the number of dimensions or channels, or ``x`` is
            smaller than a patch.
    """
    check_patches(x, weight)
    output: Tensor = linear(patches(x, weight.shape[2:]), weight.flatten(1), bias)
    return output.movedim(-1, 1)


def check_patches(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError if ``patch_matmul`` does not support these arguments."""
    kernel = weight.shape[2:]
    if x.ndim != weight.ndim or x.shape[1] != weight.shape[1]:
        raise ValueError(
            "patch_matmul: x and weight must have the same number of dimensions and input "
            f"channels; x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}."
        )
    if any(size < k for size, k in zip(x.shape[2:], kernel, strict=True)):
        raise ValueError(
            f"patch_matmul: x, {tuple(x.shape)}, is smaller than a patch, {tuple(kernel)}."
        )


def patches(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """Return the patches of *x*, ``(batch, *positions, in_channels * elements)``."""
    count = len(kernel)
    for i, k in enumerate(kernel):
        dim = 2 + 2 * i
        whole = x.shape[dim] // k
        x = torch.unflatten(x.narrow(dim, 0, whole * k), dim, (whole, k))
    places = range(2, 2 + 2 * count, 2)
    x = x.permute(0, *places, 1, *(place + 1 for place in places))
    return x.flatten(1 + count)


@conv_nd.register_input_generator
def _conv_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, list[int], list[int], list[int], int]:
    x = torch.randn(num_tokens, 4, 9, 7, device=device)
    weight = torch.randn(hidden_size, 2, 3, 2, device=device) / 12**0.5
    bias = torch.randn(hidden_size, device=device)
    return x.to(dtype), weight.to(dtype), bias.to(dtype), [2, 1], [1, 1, 0, 1], [1, 2], 2


@patch_matmul.register_input_generator
def _patch_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(num_tokens, 3, 9, 8, device=device)
    weight = torch.randn(hidden_size, 3, 4, 4, device=device) / 48**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(hidden_size, device=device).to(dtype)


# Sums in a different order: the error grows with the number of terms.
for _op in (conv_nd, patch_matmul):
    _op.override_tolerance(torch.float32, atol=1e-4, rtol=1e-5)
    _op.override_tolerance(torch.bfloat16, atol=1e-2, rtol=1.6e-2)
    _op.override_tolerance(torch.float16, atol=1e-2, rtol=2e-3)


# Short causal depthwise convolution with a state.
#
# The state is ``(slots, channels, width - 1)``: the last inputs of each channel, the latest
# last.
#
# Source: the convolution before the scan of Mamba, Gu and Dao, arXiv:2312.00752, section 3.4.


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
    arguments.check_sequences("causal_conv1d", query_start_loc, slot_idx, has_initial_state)
    tokens, count, history = x.shape[0], slot_idx.shape[0], weight.shape[1] - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    sequence, _ = locate(tokens, query_start_loc)
    first_inputs = (
        arguments.initial_states(x_state, slot_idx, has_initial_state).to(dtype).transpose(1, 2)
    )
    # Lay out the inputs of each sequence after its initial state, so that an output is a sum over
    # neighbors. Tokens after the last sequence follow unused space.
    places = torch.arange(tokens, device=x.device) + (sequence + 1) * history
    earlier = _windows(query_start_loc[:-1], count, history)
    inputs = x.new_zeros(tokens + (count + 1) * history, x.shape[1], dtype=dtype)
    inputs = inputs.index_copy(0, places, x.to(dtype))
    inputs = inputs.index_copy(0, earlier.flatten(), first_inputs.flatten(0, 1))
    length = tokens + count * history
    taps = [inputs[j : j + length] for j in range(history + 1)]
    y = convolve(taps, weight.to(dtype), bias, activation)[places - history]
    y = torch.where(arguments.is_computed(sequence, slot_idx)[:, None], y, 0).to(x.dtype)
    last = inputs[_windows(query_start_loc[1:], count, history)].transpose(1, 2)
    return y, arguments.write_states(x_state, slot_idx, last)


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
    arguments.check_slots("causal_conv1d_update", slot_idx, x.shape[0])
    y, inputs = conv_step(x, weight, bias, arguments.read_states(x_state, slot_idx), activation)
    y = torch.where(slot_idx[:, None] >= 0, y, 0).contiguous()
    return y, arguments.write_states(x_state, slot_idx, inputs)


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
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, x_state: Tensor, activation: str | None
) -> None:
    """Raise ValueError unless the arguments of a convolution called *op* fit together."""
    arguments.check_shape(op, "x", x, -1, -1)
    channels = x.shape[1]
    arguments.check_shape(op, "weight", weight, channels, -1)
    if weight.shape[1] == 0:
        raise arguments.misfit(op, "weight", weight, f"({channels}, K) with K of at least 1")
    arguments.check_shape(op, "x_state", x_state, -1, channels, weight.shape[1] - 1)
    if bias is not None:
        arguments.check_shape(op, "bias", bias, channels)
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
def _causal_conv_inputs(
    num_tokens: int = 8,
    hidden_size: int = 24,
    width: int = 4,
    num_seqs: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, str]:
    """Make packed sequences; every second one has an initial state."""
    x, weight, bias, *_ = _causal_conv_update_inputs(num_tokens, hidden_size, width, dtype, device)
    state = torch.randn(num_seqs + 2, hidden_size, width - 1, device=device).to(dtype)
    return x, weight, bias, state, *arguments.sequence_inputs(num_tokens, num_seqs, device), "silu"


@causal_conv1d_update.register_input_generator
def _causal_conv_update_inputs(
    num_tokens: int = 8,
    hidden_size: int = 24,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, str]:
    """Make one token for each of *num_tokens* sequences; the first quarter is padding."""
    x = arguments.random_rows(num_tokens, hidden_size, dtype, device)
    weight = torch.randn(hidden_size, width, device=device).to(dtype) / width**0.5
    state = torch.randn(num_tokens + 4, hidden_size, width - 1, device=device).to(dtype)
    slots = arguments.some_slots(num_tokens, device)
    return x, weight, arguments.random_row(x), state, slots, "silu"


for _causal_conv_op in (causal_conv1d, causal_conv1d_update):
    # A few products summed in a different order, rounded once; values are of order one.
    _causal_conv_op.override_tolerance(torch.float32, atol=1e-5, rtol=1e-5)
    _causal_conv_op.override_tolerance(torch.bfloat16, atol=1e-2, rtol=1.6e-2)
    _causal_conv_op.override_tolerance(torch.float16, atol=2e-3, rtol=2e-3)

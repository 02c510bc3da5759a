"""State-space models: the selective scan of Mamba, and its decode step."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.ops import arguments
from opweave.ir.ops.attention import locate
from opweave.ir.registry import IrOp, register_op

# The linear recurrence of state-space scans, in blocks, so that it can be traced.


_BLOCK = 16


def linear_recurrence(gate: Tensor, value: Tensor, begins: Tensor) -> Tensor:
    """Return ``h`` with ``h[t] = gate[t] * h[t - 1] + value[t]``, or ``value[t]`` if it *begins*.

    Each of 16 steps runs in all blocks of 16 at once; the last steps of the blocks form a shorter
    recurrence. The number of operations is proportional to ``log16(length)``, and a trace for one
    length is valid up to the next power of 16.

    Args:
        gate: ``(length, ...)``; broadcasts to the shape of *value*.
        value: ``(length, ...)``.
        begins: bool, ``(length, ...)``; broadcasts to the shape of *value*. Not the same as a gate
            of zero, since 0 * NaN is NaN. Ignored for the first step, which always begins.
    """
    length = value.shape[0]
    if length == 0:
        return value
    gate, value, begins = (_in_blocks(t) for t in (gate, value, begins))
    h, through, cut = [value[:, 0]], [gate[:, 0]], [begins[:, 0]]
    for i in range(1, _BLOCK):
        h.append(torch.where(begins[:, i], value[:, i], gate[:, i] * h[-1] + value[:, i]))
        through.append(gate[:, i] * through[-1])
        cut.append(begins[:, i] | cut[-1])
    inside = torch.stack(h, 1)
    if length > _BLOCK:
        ends = linear_recurrence(through[-1], h[-1], cut[-1])
        before = torch.stack(through, 1) * one_before(ends)[:, None]
        inside = torch.where(torch.stack(cut, 1), inside, inside + before)
    return inside.flatten(0, 1)[:length]


def one_before(t: Tensor) -> Tensor:
    """Shift *t* by one along dimension 0; the first element becomes zeros."""
    return torch.cat((torch.zeros_like(t[:1]), t[:-1]))


def _in_blocks(t: Tensor) -> Tensor:
    """Return *t* as ``(blocks, 16, ...)``, padded with zeros."""
    blocks = (t.shape[0] + _BLOCK - 1) // _BLOCK
    missing = blocks * _BLOCK - t.shape[0]
    padded = functional.pad(t, (0, 0) * (t.ndim - 1) + (0, missing))
    return padded.reshape(blocks, _BLOCK, *t.shape[1:])


# The selective state-space scan of Mamba over packed sequences.
#
# Names follow the paper: ``h = exp(dt a) h + dt b x``, ``y = c h + d x``, then ``y silu(z)``.
#
# Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
# arXiv:2312.00752.


@register_op(allow_inplace=True)
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
    """Scan packed sequences: ``N`` states per channel, each with its own decay rate.

    ``dt`` is ``softplus(dt + dt_bias)`` with *dt_softplus*. A sequence starts from the state in its
    slot if it *has_initial_state*, else from zeros. Computed in float32 (float64 stays), rounded
    once. Tokens after the last sequence and of sequences with slot -1 give zeros. Sequences must
    not share a slot. Non-finite values affect only later tokens of their own sequence.

    Args:
        x: ``(tokens, channels)``, floating point.
        dt: the shape of ``x``: the time step of each channel.
        a: ``(channels, N)``, negative.
        b, c: ``(tokens, N)``, or ``(tokens, groups, N)`` where consecutive channels share a group.
        d: ``(channels,)`` or None.
        z: the gate, the shape of ``x``, or None.
        dt_bias: ``(channels,)`` or None.
        x_state: ``(slots, channels, N)``, any floating dtype; float32 recommended.
        query_start_loc: ``(sequences + 1,)``, integer, non-decreasing, from 0.
        slot_idx: ``(sequences,)``, integer: the slot of each sequence; -1 for padding.
        has_initial_state: ``(sequences,)``, bool.
        dt_softplus: apply softplus to the time step.

    Returns:
        The result in the shape and dtype of ``x``, and the updated ``x_state``.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: a slot does not exist.
    """
    check_scan("selective_scan", x, dt, a, b, c, d, z, dt_bias, x_state)
    arguments.check_sequences("selective_scan", query_start_loc, slot_idx, has_initial_state)
    dtype = torch.promote_types(x.dtype, torch.float32)
    tokens, count = x.shape[0], slot_idx.shape[0]
    sequence, position = locate(tokens, query_start_loc)
    initial = arguments.initial_states(x_state, slot_idx, has_initial_state).to(dtype)
    step = time_step(dt, dt_bias, dt_softplus, None, None, dtype)
    gate = torch.exp(step[..., None] * a.to(dtype))  # (tokens, channels, N)
    value = (step * x.to(dtype))[..., None] * by_channel(b.to(dtype), x.shape[1])
    # An extra token that empty sequences can index.
    gate, value = (functional.pad(t, (0, 0, 0, 0, 0, 1)) for t in (gate, value))
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    some = (ends > starts)[:, None, None]
    # Each sequence starts from its initial state, independent of the previous one.
    first = torch.where(some[:, 0, 0], starts, tokens).long()
    value = value.index_add(0, first, torch.where(some, gate[first] * initial, 0))
    begins = functional.pad((position == 0) & (sequence < count), (0, 1), value=True)
    h = linear_recurrence(gate, value, begins[:, None, None])
    y = (h[:tokens] * by_channel(c.to(dtype), x.shape[1])).sum(-1)
    y = torch.where(arguments.is_computed(sequence, slot_idx)[:, None], finish(y, x, d, z), 0)
    last = torch.where(some, h[(ends - 1).clamp(min=0).long()], initial)
    return y.to(x.dtype).contiguous(), arguments.write_states(x_state, slot_idx, last)


def time_step(
    dt: Tensor,
    dt_bias: Tensor | None,
    softplus: bool,
    smallest: float | None,
    largest: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the time step of a scan, clamped to its limits."""
    step = dt.to(dtype)
    if dt_bias is not None:
        step = step + dt_bias.to(dtype)
    if softplus:
        step = functional.softplus(step)
    return step if smallest is None and largest is None else step.clamp(smallest, largest)


def by_channel(t: Tensor, channels: int) -> Tensor:
    """Expand *t*, ``(tokens, N)`` or ``(tokens, groups, N)``, for *channels* channels or heads."""
    if t.ndim == 2:
        return t[:, None]
    return t.repeat_interleave(channels // t.shape[1], dim=1)


def finish(y: Tensor, x: Tensor, d: Tensor | None, z: Tensor | None) -> Tensor:
    """Return ``(y + d * x) * silu(z)`` in the dtype of *y*; *d* has the last dimensions of *x*."""
    if d is not None:
        y = y + d.to(y.dtype) * x.to(y.dtype)
    return y if z is None else y * functional.silu(z.to(y.dtype))


_SCAN_SHAPES = {2: "(tokens, channels)", 3: "(tokens, heads, head_size)"}
_SCAN_DIMS = {"selective_scan": (2,), "ssd_chunk_scan": (3,), "selective_state_update": (2, 3)}


def check_scan(
    op: str,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    x_state: Tensor,
    chunk_size: int = 1,
) -> None:
    """Raise ValueError unless the arguments of the scan or step called *op* fit together."""
    if x.ndim not in _SCAN_DIMS[op]:
        raise arguments.misfit(
            op, "x", x, " or ".join(_SCAN_SHAPES[ndim] for ndim in _SCAN_DIMS[op])
        )

    def end(t: Tensor, ndim: int) -> int | None:
        """Return 2 for a *t* with one number per head, which then has *ndim* dimensions."""
        is_per_head = op == "ssd_chunk_scan" or (x.ndim == 3 and t.ndim == ndim)
        return 2 if is_per_head else None

    arguments.check_shape(op, "x_state", x_state, -1, *x.shape[1:], -1)
    arguments.check_shape(op, "a", a, *x_state.shape[1 : end(a, 1)])
    arguments.check_shape(op, "dt", dt, *x.shape[: end(dt, 2)])
    if z is not None:
        arguments.check_shape(op, "z", z, *x.shape)
    for name, vector in (("d", d), ("dt_bias", dt_bias)):
        if vector is not None:
            arguments.check_shape(op, name, vector, *x.shape[1 : end(vector, 1)])
    _check_groups(op, x, b, c, x_state.shape[-1])
    if chunk_size < 1:
        raise ValueError(f"{op}: chunk_size={chunk_size} is not positive.")


def _check_groups(op: str, x: Tensor, b: Tensor, c: Tensor, states: int) -> None:
    """Raise ValueError unless *b* and *c* are ``(tokens, [groups,] N)`` for the heads of *x*."""
    if b.ndim == 2:
        arguments.check_shape(op, "b", b, x.shape[0], states)
    else:
        arguments.check_shape(op, "b", b, x.shape[0], -1, states)
        if b.shape[1] == 0 or x.shape[1] % b.shape[1]:
            expected = f"({x.shape[0]}, a divisor of {x.shape[1]}, {states})"
            raise arguments.misfit(op, "b", b, expected)
    arguments.check_shape(op, "c", c, *b.shape)


def register_scan_fake(op: IrOp) -> None:
    """Give *op* a fake implementation that only checks shapes.

    The native function would specialize a graph on the sequence length.
    """

    @wraps(op.native, assigned=())
    def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        values = op.bind(*args, **kwargs)
        named = dict(zip(op.schema.names, values, strict=True))
        checked = (*values[:9], named.get("chunk_size", 1))
        check_scan(op.name, *checked)
        arguments.check_sequences(op.name, *values[9:12])
        x, x_state = values[0], values[8]
        return x.new_empty(x.shape), x_state.new_empty(x_state.shape)

    op.register_fake(fake)


register_scan_fake(selective_scan)


def scan_inputs(
    num_tokens: int,
    channels: tuple[int, ...],
    states: tuple[int, ...],
    slots: int,
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, ...]:
    """Make the arguments of a scan up to the states, ``x_state``.

    Args:
        num_tokens: number of tokens.
        channels: ``(channels,)``, or ``(heads, head_size)``.
        states: ``(N,)``, or ``(groups, N)``: the size of ``b`` and ``c`` for a token.
        slots: number of states in ``x_state``.
        dtype: the dtype of the activations.
        device: the device.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    heads, wide = channels[0], torch.promote_types(dtype, torch.float32)
    decay = -torch.rand((heads, *states[:1]) if len(channels) == 1 else heads, device=device) - 0.1
    state = torch.randn(slots, *channels, states[-1], device=device)
    x, z = normal(2, num_tokens, *channels)
    b, c = normal(2, num_tokens, *states)
    # Without softplus, a state grows with every step below zero.
    dt, dt_bias = normal(num_tokens, heads).abs(), normal(heads) / 8
    return x, dt, decay.to(wide), b, c, normal(heads), z, dt_bias, state.to(wide)


@selective_scan.register_input_generator
def _selective_scan_inputs(
    num_tokens: int = 8,
    hidden_size: int = 24,
    state_size: int = 4,
    num_seqs: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """Make packed sequences; every second one has an initial state."""
    sizes = (hidden_size,), (state_size,), num_seqs + 2
    where = arguments.sequence_inputs(num_tokens, num_seqs, device)
    return *scan_inputs(num_tokens, *sizes, dtype, device), *where, True


# Sums over many tokens in a different order, and a different exponential. Results are up to about
# ten; in 16-bit dtypes, their rounding dominates.
selective_scan.override_tolerance(torch.float32, atol=1e-4, rtol=1e-4)
selective_scan.override_tolerance(torch.bfloat16, atol=2e-2, rtol=1.6e-2)
selective_scan.override_tolerance(torch.float16, atol=4e-3, rtol=2e-3)


# One decode step of a selective state-space model, for a batch of sequences.
#
# Source: Gu and Dao, arXiv:2312.00752; with heads, Dao and Gu, arXiv:2405.21060.


@register_op(allow_inplace=True)
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
    """Advance every sequence by one token: a step of ``selective_scan`` or ``ssd_chunk_scan``.

    Without heads, *x* is ``(sequences, channels)`` and the other shapes are as in
    ``selective_scan``. With heads, *x* is ``(sequences, heads, head_size)`` and the other shapes
    are as in ``ssd_chunk_scan``; ``dt``, ``a``, ``d`` and ``dt_bias`` may also vary within a head.

    Args:
        x: ``(sequences, channels)`` or ``(sequences, heads, head_size)``, floating point.
        dt: ``(sequences, channels)``, ``(sequences, heads)`` or the shape of ``x``.
        a: ``(channels, N)``, ``(heads,)`` or ``(heads, head_size, N)``, negative.
        b, c: ``(sequences, N)`` or ``(sequences, groups, N)``.
        d, dt_bias: ``(channels,)``, ``(heads,)`` or ``(heads, head_size)``; or None.
        z: the gate, the shape of ``x``, or None.
        x_state: ``(slots, channels, N)`` or ``(slots, heads, head_size, N)``.
        slot_idx: ``(sequences,)``, integer: the slot of each sequence, all different; -1 for
            padding, whose result is zeros.
        dt_softplus: apply softplus to the time step.
        dt_min, dt_max: limits of the time step, or None.

    Returns:
        The result in the shape and dtype of ``x``, and the updated ``x_state``.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: a slot does not exist.
    """
    check_scan("selective_state_update", x, dt, a, b, c, d, z, dt_bias, x_state)
    arguments.check_slots("selective_state_update", slot_idx, x.shape[0])
    state = arguments.read_states(x_state, slot_idx)
    y, h = scan_step(x, dt, a, b, c, d, z, dt_bias, state, dt_softplus, dt_min, dt_max)
    y = torch.where(slot_idx.view(-1, *[1] * (x.ndim - 1)) >= 0, y, 0)
    return y.contiguous(), arguments.write_states(x_state, slot_idx, h)


def scan_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    dt_softplus: bool,
    dt_min: float | None,
    dt_max: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the results of one token per sequence, and the new states."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    one = x.ndim - 1  # number of dimensions of a token
    bias = None if dt_bias is None else _filled(dt_bias, one)
    step = time_step(_filled(dt, x.ndim), bias, dt_softplus, dt_min, dt_max, dtype)[..., None]
    b, c = (by_channel(t.to(dtype), x.shape[1]) for t in (b, c))
    if x.ndim == 3:
        b, c = b[:, :, None], c[:, :, None]
    gate = torch.exp(step * _filled(a.to(dtype), one + 1))
    h = gate * state.to(dtype) + step * x.to(dtype)[..., None] * b
    y = finish((h * c).sum(-1), x, None if d is None else _filled(d, one), z)
    return y.to(x.dtype), h


def _filled(t: Tensor, ndim: int) -> Tensor:
    """Append dimensions of size 1 to *t* until it has *ndim* dimensions."""
    return t.view(*t.shape, *[1] * (ndim - t.ndim))


@selective_state_update.register_input_generator
def _selective_state_update_inputs(
    num_tokens: int = 8,
    num_heads: int = 4,
    head_size: int = 6,
    state_size: int = 5,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """Make one token for each of *num_tokens* sequences; the first quarter is padding."""
    sizes = (num_heads, head_size), (1, state_size), num_tokens + 4
    slots = arguments.some_slots(num_tokens, device)
    return *scan_inputs(num_tokens, *sizes, dtype, device), slots, True, None, None


# A sum over the states in a different order. Results are up to about ten; in 16-bit dtypes, their
# rounding dominates.
selective_state_update.override_tolerance(torch.float32, atol=2e-5, rtol=1e-5)
selective_state_update.override_tolerance(torch.bfloat16, atol=2e-2, rtol=1.6e-2)
selective_state_update.override_tolerance(torch.float16, atol=4e-3, rtol=2e-3)

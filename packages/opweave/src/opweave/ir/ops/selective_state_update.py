"""One decode step of a selective state-space model, for a batch of sequences.

Source: Gu and Dao, arXiv:2312.00752; with heads, Dao and Gu, arXiv:2405.21060.
"""

import torch
from torch import Tensor

from opweave.ir.ops.checks import check_shape, misfit
from opweave.ir.ops.selective_scan import by_channel, check_groups, finish, time_step
from opweave.ir.ops.state_slots import check_slots, read_states, some_slots, write_states
from opweave.ir.registry import register_op


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
    check_update(x, dt, a, b, c, d, z, dt_bias, x_state, slot_idx)
    state = read_states(x_state, slot_idx)
    y, h = scan_step(x, dt, a, b, c, d, z, dt_bias, state, dt_softplus, dt_min, dt_max)
    y = torch.where(slot_idx.view(-1, *[1] * (x.ndim - 1)) >= 0, y, 0)
    return y.contiguous(), write_states(x_state, slot_idx, h)


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


def check_update(
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
) -> None:
    """Raise ValueError unless the arguments of ``selective_state_update`` fit together."""
    op = "selective_state_update"
    if x.ndim not in (2, 3):
        raise misfit(op, "x", x, "(sequences, channels) or (sequences, heads, head_size)")
    check_shape(op, "x_state", x_state, -1, *x.shape[1:], -1)
    check_shape(op, "a", a, *x_state.shape[1 : 2 if a.ndim == 1 and x.ndim == 3 else None])
    check_shape(op, "dt", dt, *x.shape[: 2 if dt.ndim == 2 else None])
    if z is not None:
        check_shape(op, "z", z, *x.shape)
    for name, vector in (("d", d), ("dt_bias", dt_bias)):
        if vector is not None:
            check_shape(op, name, vector, *x.shape[1 : 2 if vector.ndim == 1 else None])
    check_groups(op, x, b, c, x_state.shape[-1])
    check_slots(op, slot_idx, x.shape[0])


def _filled(t: Tensor, ndim: int) -> Tensor:
    """Append dimensions of size 1 to *t* until it has *ndim* dimensions."""
    return t.view(*t.shape, *[1] * (ndim - t.ndim))


@selective_state_update.register_input_generator
def _inputs(
    num_tokens: int = 8,
    num_heads: int = 4,
    head_size: int = 6,
    state_size: int = 5,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    bool, float | None, float | None,
]:  # fmt: skip
    """Make one token for each of *num_tokens* sequences; the first quarter is padding."""
    x, z = torch.randn(2, num_tokens, num_heads, head_size, device=device).to(dtype)
    dt = torch.randn(num_tokens, num_heads, device=device).to(dtype)
    b, c = torch.randn(2, num_tokens, 1, state_size, device=device).to(dtype)
    d, dt_bias = torch.randn(2, num_heads, device=device).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    a = (-torch.rand(num_heads, device=device) - 0.1).to(wide)
    state = torch.randn(num_tokens + 4, num_heads, head_size, state_size, device=device).to(wide)
    slots = some_slots(num_tokens, device)
    return x, dt, a, b, c, d, z, dt_bias, state, slots, True, None, None


# A sum over the states in a different order. Results are up to about ten; in 16-bit dtypes, their
# rounding dominates.
selective_state_update.override_tolerance(torch.float32, atol=2e-5, rtol=1e-5)
selective_state_update.override_tolerance(torch.bfloat16, atol=2e-2, rtol=1.6e-2)
selective_state_update.override_tolerance(torch.float16, atol=4e-3, rtol=2e-3)

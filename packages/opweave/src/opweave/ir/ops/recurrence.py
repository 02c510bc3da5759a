"""The linear recurrence of state-space scans, in blocks, so that it can be traced."""

import torch
from torch import Tensor
from torch.nn import functional

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

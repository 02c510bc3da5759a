"""Memory layouts of the same values, with NaN in the gaps.

A kernel that reads past a row reads NaN. A write into a gap is detected by comparing its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from opweave.conformance import inputs
from opweave.conformance.case import Case
from opweave.conformance.subject import Subject

Layout = Callable[[Tensor], Tensor]
_MARGIN = 3  # odd, so that rows are aligned to nothing


def _between(t: Tensor) -> float:
    """Return the value that fills the gaps: NaN, or a valid index for integers."""
    return float("nan") if t.is_floating_point() else 0.0


def sliced(t: Tensor) -> Tensor:
    """Rows inside wider rows, starting in the middle of one."""
    wide = _filled(t, (*t.shape[:-1], t.shape[-1] + 2 * _MARGIN))
    return wide[..., _MARGIN : _MARGIN + t.shape[-1]].copy_(t)


def offset(t: Tensor) -> Tensor:
    """Contiguous, one element into its storage."""
    return _filled(t, (t.numel() + 2,))[1:-1].view(t.shape).copy_(t)


def stepped(t: Tensor) -> Tensor:
    """Every second row of a tensor, or every second element of a vector."""
    twice = _filled(t, (2 * t.shape[0], *t.shape[1:]))
    return twice[::2].copy_(t)


def scattered(t: Tensor) -> Tensor:
    """Every second element of each row."""
    return _filled(t, (*t.shape[:-1], 2 * t.shape[-1]))[..., ::2].copy_(t)


def transposed(t: Tensor) -> Tensor:
    """The last two dimensions exchanged in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.ndim > 1 else t


def rotated(t: Tensor) -> Tensor:
    """The first two dimensions exchanged in memory; rows stay rows."""
    return t.transpose(0, 1).contiguous().transpose(0, 1) if t.ndim > 2 else t


def expanded(t: Tensor) -> Tensor:
    """The first row, repeated without memory of its own."""
    return t[:1].expand(t.shape) if t.ndim > 1 and t.shape[0] else t


LAYOUTS: dict[str, Layout] = {
    layout.__name__: layout
    for layout in (sliced, offset, stepped, scattered, transposed, rotated, expanded)
}


def laid_out(subject: Subject, dtypes: int | None = None) -> Iterator[Case]:
    """Yield cases in every layout: of all tensors at once, and of each alone."""
    for base in inputs.usual(subject, dtypes):
        places = [i for i, v in enumerate(base.values) if isinstance(v, Tensor) and v.ndim]
        for name, layout in LAYOUTS.items():
            matrices = [i for i in places if base.values[i].ndim > 1]
            groups = [matrices, places, *([i] for i in places)]
            for group in {tuple(g): None for g in groups if g}:
                changed = [subject.op.schema.names[i] for i in group]
                values = [layout(v) if i in group else v for i, v in enumerate(base.values)]
                yield base.with_values(f"{' and '.join(changed)} {name}", values)


def _filled(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    if t.dtype.itemsize == 1 and t.is_floating_point():  # torch cannot fill it with NaN everywhere
        return torch.zeros(shape, dtype=t.dtype, device=t.device)
    return torch.full(shape, _between(t), dtype=t.dtype, device=t.device)

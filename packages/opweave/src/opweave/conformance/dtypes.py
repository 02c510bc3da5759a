"""Arguments of different dtypes: weights wider or narrower than activations, other integers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from opweave.conformance import inputs
from opweave.conformance.case import Case
from opweave.conformance.subject import Subject

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)


def mixed(subject: Subject) -> Iterator[Case]:
    """Yield cases with one tensor, or all that are not activations, in another dtype."""
    activations = subject.op.activation_indices
    for base in inputs.usual(subject):
        places = [i for i, v in enumerate(base.values) if isinstance(v, Tensor)]
        rest = [i for i in places if i not in activations]
        for group in {tuple(g): None for g in (rest, *([i] for i in places)) if g}:
            for kind in (_FLOATS, _INTEGERS):
                yield from _cast(base, group, kind)


def _cast(base: Case, group: tuple[int, ...], kind: tuple[torch.dtype, ...]) -> Iterator[Case]:
    for dtype in kind:
        changed = [i for i in group if base.values[i].dtype in set(kind) - {dtype}]
        if changed:
            names = " and ".join(base.op.schema.names[i] for i in changed)
            values = [v.to(dtype) if i in changed else v for i, v in enumerate(base.values)]
            yield base.with_values(f"{names} {str(dtype).removeprefix('torch.')}", values)

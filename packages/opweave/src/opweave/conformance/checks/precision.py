"""Precision: an argument of a wider dtype than the others keeps its precision.

A float32 weight that a kernel rounds to the bfloat16 of its activations is not visible in the
results: each stays within one rounding of the right one. So the argument itself is rounded, which
must change the bits of the kernel's results where it changes many of native's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from opweave.conformance import dtypes, inputs
from opweave.conformance.case import Case, Outputs, outputs_of
from opweave.conformance.check import Check, Finding, each, not_native
from opweave.conformance.memory import copied, same_bits
from opweave.conformance.subject import Subject
from opweave.ir.selection import tensors_in

_NARROW = (torch.bfloat16, torch.float16)
_MANY = 16  # of fewer results, a right kernel that rounds otherwise may round all alike


def _cases(subject: Subject) -> Iterator[Case]:
    yield from inputs.usual(subject)
    yield from dtypes.mixed(subject)


def _keeps_precision(subject: Subject, case: Case) -> Finding:
    narrow = next((t.dtype for t in tensors_in(case.values) if t.dtype in _NARROW), None)
    if narrow is None:
        return None
    for i, value in enumerate(case.values):
        if isinstance(value, Tensor) and value.dtype is torch.float32:
            rounded = value.to(narrow).to(torch.float32)
            values = [rounded if i == j else v for j, v in enumerate(case.values)]
            name, other = case.op.schema.names[i], case.with_values("rounded", values)
            if _is_ignored(subject, case, other):
                dtype = str(narrow).removeprefix("torch.")
                return f"rounds {name} to {dtype}: results are the same when it is rounded before"
    return None


def _is_ignored(subject: Subject, case: Case, other: Case) -> bool:
    """Whether *other* gives the kernel the results of *case*, and native many others."""
    if other.refusal is not None or _differing(case.native, other.native) < _MANY:
        return False
    one, two = (outputs_of(subject.run(copied(c.values))) for c in (case, other))
    return all(same_bits(a, b) for a, b in zip(one, two, strict=True))


def _differing(one: Outputs, other: Outputs) -> int:
    """Return how many elements are not equal."""
    pairs = zip(one, other, strict=True)
    return sum(int((a.double() != b.double()).sum()) for a, b in pairs if a.shape == b.shape)


CHECK = Check(
    "precision",
    "arguments of a wider dtype are not rounded to the dtype of the activations",
    each(_cases, _keeps_precision),
    not_native,
)

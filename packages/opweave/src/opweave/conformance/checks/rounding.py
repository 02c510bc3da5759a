"""Rounding: implementations that round less often than the definition are more accurate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from opweave.conformance import inputs
from opweave.conformance.case import Case, outputs_of
from opweave.conformance.check import Check, Finding, each
from opweave.conformance.memory import copied
from opweave.conformance.subject import Subject
from opweave.ir.traits import ROUNDS_LESS

_NARROW = (torch.bfloat16, torch.float16)
_LUCK = 1.05  # of few elements, the errors happen to be larger


def _claims(subject: Subject) -> bool:
    return subject.has(ROUNDS_LESS)


def _cases(subject: Subject) -> Iterator[Case]:
    yield from chain(inputs.usual(subject), inputs.few_and_many(subject))


def _is_closer(subject: Subject, case: Case) -> Finding:
    outputs = outputs_of(subject.run(copied(case.values)))
    for i, parts in enumerate(zip(outputs, case.native, case.reference, strict=True)):
        found, native, reference = parts
        if found.dtype not in _NARROW:
            continue
        ours, theirs = _error(found, reference), _error(native, reference)
        if ours > _LUCK * theirs:
            return (
                f"output {i} is not rounded less often than native's: its root-mean-square error "
                f"is {ours:.2e}, native's is {theirs:.2e}"
            )
    return None


def _error(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference.double()).square().mean().sqrt())


CHECK = Check(
    "rounding",
    "with the trait rounds_less: outputs are at least as accurate as those of native",
    each(_cases, _is_closer),
    _claims,
)

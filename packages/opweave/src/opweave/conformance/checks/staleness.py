"""Staleness: a result depends on the current values of the arguments, not on earlier ones.

A kernel that caches a converted weight by the weight's address is wrong after the next
``load_state_dict``, which writes in place.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from opweave.conformance import inputs
from opweave.conformance.case import Case, outputs_of
from opweave.conformance.check import Check, Finding, Findings, accepted
from opweave.conformance.compare import bits_problem
from opweave.conformance.memory import copied
from opweave.conformance.subject import Subject
from opweave.ir.selection import tensors_in


def _findings(subject: Subject) -> Findings:
    for case, other in zip(inputs.usual(subject), inputs.usual(subject), strict=True):
        yield from accepted(subject, case, partial(_follows, other=other))


def _follows(subject: Subject, case: Case, other: Case) -> Finding:
    """Change one argument after the other, and compare with a call of copies."""
    for place, name in enumerate(case.op.schema.names):
        changed = _other_values(case, other, place)
        values = copied(case.values)
        if not changed:
            continue
        subject.run(values)
        for tensor, new in zip(tensors_in(values[place : place + 1]), changed, strict=True):
            tensor.copy_(new)
        wanted = outputs_of(subject.run(copied(values)))
        problem = bits_problem(wanted, outputs_of(subject.run(values)))
        if problem:
            problem = problem.replace("native has", "a copy of the arguments gives")
            return f"{name} was changed in place since the last call, and {problem}"
    return None


def _other_values(case: Case, other: Case, place: int) -> list[Tensor]:
    """Return other values of an argument: numbers reversed, positions as in *other*, if they fit.

    An empty list if no argument can be changed.
    """
    tensors, others = (tensors_in(c.values[place : place + 1]) for c in (case, other))
    if any(map(_has_rows_of_numbers, tensors)):
        return [_reversed(t) if _has_rows_of_numbers(t) else t for t in tensors]
    if [t.shape for t in tensors] != [t.shape for t in others]:
        return []
    changed = [other.values[place] if i == place else v for i, v in enumerate(case.values)]
    return others if case.with_values("", changed).refusal is None else []


def _has_rows_of_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor can be reversed; positions cannot, since they must fit the rest."""
    is_of_numbers = tensor.is_floating_point() or tensor.dtype is torch.int8
    return is_of_numbers and tensor.ndim > 0 and tensor.shape[-1] > 1


def _reversed(tensor: Tensor) -> Tensor:
    words = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return words.flip(-1).view(tensor.dtype)


CHECK = Check(
    "staleness",
    "after an argument changes in place, the result uses its new values",
    _findings,
)

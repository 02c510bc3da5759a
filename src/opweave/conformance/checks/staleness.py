"""Staleness: a result is of what the arguments hold now, not of what they held at an earlier call.

A kernel that keeps what it made of a weight, by the weight's address, is wrong after the next
``load_state_dict``, which writes in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.conformance import inputs
from opweave.conformance.case import Case, outputs_of
from opweave.conformance.check import Check, Finding, each
from opweave.conformance.compare import bits_problem
from opweave.conformance.memory import copied
from opweave.conformance.subject import Subject
from opweave.ir.selection import tensors_in


def _follows(subject: Subject, case: Case) -> Finding:
    for place, name in enumerate(case.op.schema.names):
        values = copied(case.values)
        changed = [t for t in tensors_in(values[place : place + 1]) if _has_rows_of_numbers(t)]
        if not changed:
            continue
        subject.run(values)
        for tensor in changed:
            _reverse_rows(tensor)
        wanted = outputs_of(subject.run(copied(values)))
        problem = bits_problem(wanted, outputs_of(subject.run(values)))
        if problem:
            problem = problem.replace("native has", "a copy of the arguments gives")
            return f"{name} was changed in place since the last call, and {problem}"
    return None


def _has_rows_of_numbers(tensor: Tensor) -> bool:
    """Whether there is something to reverse, and it is no positions, which others must fit."""
    is_of_numbers = tensor.is_floating_point() or tensor.dtype is torch.int8
    return is_of_numbers and tensor.ndim > 0 and tensor.shape[-1] > 1


def _reverse_rows(tensor: Tensor) -> None:
    words = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    words.copy_(words.flip(-1))


CHECK = Check(
    "staleness",
    "after an argument is changed in place, the result is that of its new numbers",
    each(inputs.usual, _follows),
)

"""Donation: ``maybe_inplace`` writes only to its activations, also if arguments share memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from opweave.base import compat
from opweave.conformance import inputs, layouts, scalars
from opweave.conformance.case import Case, outputs_of
from opweave.conformance.check import Check, Finding, each
from opweave.conformance.compare import outputs_problem
from opweave.conformance.memory import Snapshot, copied
from opweave.conformance.subject import Subject
from opweave.ir.memory import disjoint


def _donates(subject: Subject) -> bool:
    return subject.op.allow_inplace


def _cases(subject: Subject) -> Iterator[Case]:
    yield from chain(
        inputs.usual(subject),
        inputs.empty(subject),
        inputs.few_and_many(subject),
        scalars.without(subject),
        layouts.laid_out(subject),
    )


def takes(subject: Subject, case: Case) -> Finding:
    """Call with donated activations, and check the result and the memory."""
    values = copied(case.values)
    activations = [values[i] for i in subject.op.activation_indices]
    before = Snapshot(values)
    result = subject.run_donating(values)
    problem = outputs_problem(case, result)
    if problem:
        return f"maybe_inplace: {problem}"
    if before.changed(except_in=activations):
        return "maybe_inplace wrote into memory that was not donated"
    functional = outputs_of(subject.run(copied(case.values)))
    for i, (a, b) in enumerate(zip(outputs_of(result), functional, strict=True)):
        if _strides(a) != _strides(b):
            strides = f"{tuple(a.stride())}, the functional call {tuple(b.stride())}"
            return f"output {i} of maybe_inplace has strides {strides}"
    for a, b in combinations(outputs_of(result), 2):
        if compat.share_storage(a, b) and not disjoint(a, b):
            return "maybe_inplace returned two outputs in one memory"
    return None


def _strides(t: Tensor) -> list[int]:
    """Return the strides that matter: those of dimensions with more than one element."""
    return [d for n, d in zip(t.shape, t.stride(), strict=True) if n > 1] if t.numel() else []


def aliases(subject: Subject) -> Iterator[Case]:
    """Yield cases whose activations share memory: with each other, themselves, a weight."""
    op, indices = subject.op, subject.op.activation_indices
    for base in inputs.usual(subject):
        first = base.values[indices[0]]
        for i in indices[1:]:
            if base.values[i].shape == first.shape and base.values[i].dtype == first.dtype:
                both = (indices[0], i)
                yield _changed(base, "one tensor twice", both, (first, first))
                yield _changed(base, "views of one", both, (first, first.view(first.shape)))
                yield _changed(base, "overlapping", both, _overlapping(first))
                yield _changed(base, "packed", both, _packed(first))
        for i in indices:
            value = base.values[i]
            if value.ndim > 1:
                yield _changed(base, "rows in one memory", (i,), (layouts.expanded(value),))
            for j, other in enumerate(base.values):
                if j not in indices and isinstance(other, Tensor) and _fits(value, other):
                    label = f"{op.schema.names[i]} is {op.schema.names[j]}"
                    yield _changed(base, label, (i,), (other.view(value.shape),))


def _fits(value: Tensor, other: Tensor) -> bool:
    return value.dtype == other.dtype and value.numel() == other.numel() > 0


def _overlapping(t: Tensor) -> tuple[Tensor, Tensor]:
    shift = max(1, t.shape[-1] // 2)
    memory = torch.cat([t.reshape(-1), t.reshape(-1)[:shift]])
    return memory[: t.numel()].view(t.shape), memory[shift:].view(t.shape)


def _packed(t: Tensor) -> tuple[Tensor, Tensor]:
    one, other = torch.cat([t, t.flip(-1)], -1).chunk(2, -1)
    return one, other


def _changed(base: Case, label: str, indices: tuple[int, ...], tensors: tuple[Tensor, ...]) -> Case:
    values: list[Any] = list(base.values)
    for i, tensor in zip(indices, tensors, strict=True):
        values[i] = tensor
    return base.with_values(label, values)


def _survives(subject: Subject, case: Case) -> Finding:
    values = copied(case.values)
    kept = [v for i, v in enumerate(values) if i not in subject.op.activation_indices]
    before = Snapshot(kept)
    problem = outputs_problem(case, subject.run_donating(values))
    if problem:
        return f"maybe_inplace: {problem}"
    return "maybe_inplace wrote into what was not donated" if before.changed() else None


DONATION = Check(
    "donation",
    "maybe_inplace is correct, and writes only to its activations",
    each(_cases, takes),
    _donates,
)
ALIASES = Check(
    "aliases",
    "it is also correct if donated tensors share memory with each other or other arguments",
    each(aliases, _survives),
    _donates,
)

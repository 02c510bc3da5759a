"""Metadata: shapes, dtypes and strides are those of the fake implementation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor

from opweave.conformance import dtypes, inputs, layouts, scalars
from opweave.conformance.case import Case, outputs_of
from opweave.conformance.check import Check, Finding, each
from opweave.conformance.compare import structure_problem
from opweave.conformance.compat import faked
from opweave.conformance.memory import copied
from opweave.conformance.subject import Subject


def _cases(subject: Subject) -> Iterator[Case]:
    yield from chain(
        inputs.usual(subject),
        inputs.empty(subject),
        scalars.options(subject),
        scalars.without(subject),
        dtypes.mixed(subject),
        layouts.laid_out(subject, dtypes=2),  # fake tensors take their time
    )


def strides(t: Tensor) -> list[int]:
    """Return the strides of the dimensions with more than one element."""
    pairs = zip(t.shape, t.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1] if t.numel() else []


def as_told(subject: Subject, case: Case) -> Finding:
    """Compare the outputs' metadata with that of the fake implementation."""
    args, kwargs = subject.op.schema.split(case.values)
    told = outputs_of(faked(subject.op.fake, *args, **kwargs))
    result = subject.run(copied(case.values))
    problem = structure_problem(told, result)
    if problem:
        return problem.replace("native's", "the fake implementation's")
    for i, (found, fake) in enumerate(zip(outputs_of(result), told, strict=True)):
        if strides(found) != strides(fake):
            return (
                f"output {i} has strides {tuple(found.stride())}, the fake implementation's has "
                f"{tuple(fake.stride())}"
            )
    return None


CHECK = Check(
    "metadata",
    "shapes, dtypes, devices and strides are those of the fake implementation",
    each(_cases, as_told),
)

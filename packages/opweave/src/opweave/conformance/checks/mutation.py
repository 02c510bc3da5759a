"""Mutation: arguments do not change, and results are in new memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from opweave.base import compat
from opweave.conformance import inputs, layouts
from opweave.conformance.case import Case, Outputs, outputs_of
from opweave.conformance.check import Check, Finding, each
from opweave.conformance.memory import Snapshot, Values, copied
from opweave.conformance.subject import Subject
from opweave.ir.selection import tensors_in


def _cases(subject: Subject) -> Iterator[Case]:
    yield from inputs.usual(subject)
    yield from layouts.laid_out(subject)


def _leaves_alone(subject: Subject, case: Case) -> Finding:
    values = copied(case.values)
    before = Snapshot(values)
    return memory_problem(case, values, before, outputs_of(subject.run(values)))


def memory_problem(case: Case, values: Values, before: Snapshot, outputs: Outputs) -> Finding:
    """Return which arguments were changed or returned, or which outputs share memory."""
    changed = before.changed()
    if changed:
        return f"wrote into {_names(case, values, changed)}"
    arguments = tensors_in(values)
    shared = [t for t in arguments if any(compat.share_storage(t, out) for out in outputs)]
    if shared:
        return f"an output is a view of {_names(case, values, shared)}"
    if any(compat.share_storage(a, b) for a, b in combinations(outputs, 2)):
        return "two outputs share memory"
    return None


def _names(case: Case, values: tuple[object, ...], tensors: Sequence[object]) -> str:
    """Return which arguments these tensors are."""
    named = zip(case.op.schema.names, values, strict=True)
    return " and ".join(
        name for name, value in named if any(v is t for t in tensors for v in tensors_in((value,)))
    )


CHECK = Check(
    "mutation",
    "arguments, and the memory around them, do not change; results are in new memory",
    each(_cases, _leaves_alone),
)

"""One call of an implementation for each dtype, against the definition on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from gpu_queue.job import Row
from gpu_queue.measuring import at
from opweave.conformance import Case, Subject, subjects
from opweave.conformance.compare import outputs_problem
from opweave.conformance.inputs import usual, with_accepted_sizes
from opweave.conformance.subject import outputs_of
from opweave.conformance.verify import group_for


def subject_of(op: str, provider: str, device: str) -> Subject:
    """Return the implementation, with arguments on *device*."""
    [subject] = subjects([op], [provider])
    return replace(subject, device=device)


def run(op: str, provider: str, device: str) -> Iterator[Row]:
    """Yield how many calls were right, and what was wrong with the next one."""
    subject = subject_of(op, provider, device)
    with group_for(subject):
        yield _called(subject)


def _called(subject: Subject) -> Row:
    row: Row = {"name": "smoke", "case": str(subject), "unit": "calls"}
    fitting = with_accepted_sizes(subject) if subject.impl.supported else None
    if fitting is None:
        reason = (
            subject.impl.unsupported_reason
            or f"accepts none of the usual inputs on {subject.device}"
        )
        return row | {"value": 0, "note": reason}
    passed = 0
    for case in usual(fitting):
        if not fitting.accepts(case.values):
            continue
        expected = Case(fitting.op, case.label, _on_cpu(case.values))
        if expected.refusal is not None:
            continue
        at(str(case))
        problem = outputs_problem(expected, _on_cpu(_as_result(fitting.run(case.values))))
        if problem:
            return row | {"value": passed, "problem": f"{problem}: {case}"}
        passed += 1
    return row | {"value": passed}


def _as_result(result: object) -> object:
    outputs = outputs_of(result)
    return outputs if len(outputs) > 1 else outputs[0]


def _on_cpu(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(item) for item in value)
    return value.cpu() if isinstance(value, Tensor) else value

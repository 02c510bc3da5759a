"""opcheck: ``torch.library.opcheck`` with this implementation."""

from __future__ import annotations

from typing import Any

import torch

from opweave.conformance import inputs
from opweave.conformance.case import Case
from opweave.conformance.check import Check, Finding, each
from opweave.conformance.memory import copied
from opweave.conformance.subject import Subject

_TESTS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def _cases(subject: Subject) -> list[Case]:
    found = list(inputs.usual(subject))[:2]
    return [case for case in found if subject.compiles(case.values)]


def _passes(subject: Subject, case: Case) -> Finding:
    torch_op: Any = subject.op.torch_op
    args, kwargs = subject.op.schema.split(copied(case.values))
    with subject.op.set_priority([f"{subject.provider}!"]), torch.no_grad():
        results = torch.library.opcheck(
            torch_op, args, kwargs, test_utils=_TESTS, raise_exception=False
        )
    failed = [f"{test}: {what}" for test, what in results.items() if what != "SUCCESS"]
    return " ".join(" ".join(failed).split())[:300] if failed else None


CHECK = Check("opcheck", "torch.library.opcheck passes", each(_cases, _passes))

"""Global state: a call does not change the global state of the process."""

from __future__ import annotations

import torch

from opweave.conformance import inputs
from opweave.conformance.case import Case
from opweave.conformance.check import Check, Finding, each
from opweave.conformance.global_state import GlobalState
from opweave.conformance.memory import copied
from opweave.conformance.subject import Subject


def _leaves_alone(subject: Subject, case: Case) -> Finding:
    args, kwargs = subject.op.schema.split(copied(case.values))
    with torch.no_grad():
        before = GlobalState()  # in here: grad mode is a part of it
        subject.call(*args, **kwargs)
        changed = before.restore()
    return f"changed {' and '.join(changed)}" if changed else None


CHECK = Check(
    "global_state",
    "torch settings, random state, the environment and the working directory do not change",
    each(inputs.of_several_sizes, _leaves_alone),
)

"""Inference mode, in which models run: tensors do not have version counters."""

from __future__ import annotations

import torch

from opweave.conformance import inputs
from opweave.conformance.case import Case
from opweave.conformance.check import Check, Finding, each
from opweave.conformance.checks.donation import takes
from opweave.conformance.checks.values import is_right
from opweave.conformance.subject import Subject


def _in_inference_mode(subject: Subject, case: Case) -> Finding:
    with torch.inference_mode():
        problem = is_right(subject, case)
        if problem or not subject.op.allow_inplace:
            return problem
        return takes(subject, case)


CHECK = Check(
    "inference_mode",
    "results are the same under torch.inference_mode, with inference tensors",
    each(inputs.usual, _in_inference_mode),
)

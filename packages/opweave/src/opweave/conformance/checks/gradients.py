"""Gradients: autograd through the implementation gives the op's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.conformance import inputs, scalars
from opweave.conformance.case import Case, natively, outputs_of
from opweave.conformance.check import Check, Finding, each
from opweave.conformance.compare import near_problem
from opweave.conformance.memory import Values, copied
from opweave.conformance.subject import Subject
from opweave.ir.codegen import functional
from opweave.ir.tolerance import Tolerance
from opweave.ir.traits import DIFFERENTIABLE

# Sums over all rows, in another order.
_TOLERANCE = Tolerance(1e-4, 1e-3)


def _claims(subject: Subject) -> bool:
    return subject.has(DIFFERENTIABLE) and not subject.is_native


def _cases(subject: Subject) -> list[Case]:
    found = [*inputs.usual(subject), *scalars.without(subject)]
    return [case for case in found if _differentiated(case.values)]


def _same(subject: Subject, case: Case) -> Finding:
    with natively(subject.op):
        expected = _gradients(subject.op.native, case)
    found = _gradients(functional(subject.impl), case)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if (a is None) != (b is None):
            return f"gradient {i} is {'missing' if a is None else 'not that of native: None'}"
        problem = near_problem(a, b, _TOLERANCE) if a is not None and b is not None else None
        if problem:
            return f"gradient {i}: {problem}"
    return None


def _gradients(function: object, case: Case) -> tuple[Tensor | None, ...]:
    assert callable(function)
    values = copied(case.values)
    leaves = [t.requires_grad_() for t in _differentiated(values)]
    args, kwargs = case.op.schema.split(values)
    with torch.enable_grad():
        outputs = outputs_of(function(*args, **kwargs))
        smooth = [out for out in outputs if out.requires_grad]
        total = sum(out.double().square().sum() for out in smooth)
        assert isinstance(total, Tensor), "no output requires a gradient"
        return torch.autograd.grad(total, leaves, allow_unused=True)


def _differentiated(values: Values) -> list[Tensor]:
    """Return the tensors that have gradients: in the dtypes that are exact enough to compare."""
    wide = (torch.float32, torch.float64)
    return [v for v in values if isinstance(v, Tensor) and v.dtype in wide]


CHECK = Check(
    "gradients",
    "with the trait differentiable: autograd gives the gradient of native",
    each(_cases, _same),
    _claims,
)

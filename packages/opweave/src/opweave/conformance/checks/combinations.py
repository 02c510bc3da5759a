"""Combinations: sizes, dtypes, options, omitted tensors and layouts, drawn together.

The other checks vary one of them at a time, but a kernel may have a path for a combination.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from opweave.conformance import inputs, scalars
from opweave.conformance.case import Case
from opweave.conformance.check import Check, each, not_native
from opweave.conformance.checks.values import is_right
from opweave.conformance.layouts import LAYOUTS
from opweave.conformance.subject import Subject

_CASES = 100
_COSTLY = ("long_context",)  # options of generators that make a case slow: drawn seldom
_SECONDS = 15.0  # of processor time; a slow op gets fewer cases
_FEW = 64  # tokens
_LARGE = 300  # from here on a size is large: one of them in a case is enough

_T = TypeVar("_T")


def _drawn(subject: Subject) -> Iterator[Case]:
    start = time.process_time()
    for _ in range(_CASES):
        if time.process_time() - start > _SECONDS:
            return
        case = inputs.generated(subject, **_options(subject))
        if case is not None:
            case = _with_other_arguments(case)
            yield _laid_out(case)


def _options(subject: Subject) -> dict[str, Any]:
    """Draw options of the input generator."""
    known, found = inputs.options_of(subject), dict[str, Any]()
    if "num_tokens" in known:
        found["num_tokens"] = _one_of(inputs.TOKENS) if _chance(0.5) else _up_to(_FEW)
    if "dtype" in known:
        found["dtype"] = _one_of(inputs.DTYPES)
    for name, default in known.items():
        values = inputs.variants(name, default)
        if any(isinstance(v, int) and v >= _LARGE for v in found.values()):
            values = tuple(v for v in values if isinstance(v, torch.dtype) or v < _LARGE)
        if values and _chance(0.05 if name in _COSTLY else 0.5):
            is_width = type(default) is int and default >= inputs.WIDE
            found[name] = _up_to(_LARGE) if is_width and _chance(0.3) else _one_of(values)
    return found


def _with_other_arguments(case: Case) -> Case:
    """Draw scalars, and omit optional tensors."""
    for i, param in enumerate(case.op.schema.params):
        others: Sequence[Any]
        if param.is_tensor:
            others = [None] if param.is_optional else []
        else:
            others = [] if param.is_tensor_list else scalars.others(param, case.values[i])
        if others and _chance(0.3):
            changed = scalars.replaced(case, i, param.name, _one_of(others))
            case = changed if changed.refusal is None else case
    return case


def _laid_out(case: Case) -> Case:
    """Draw a layout for some of the tensors."""
    values, labels = list(case.values), []
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and value.ndim and _chance(0.4):
            name = _one_of(list(LAYOUTS))
            values[i] = LAYOUTS[name](value)
            labels.append(f"{case.op.schema.names[i]} {name}")
    return case.with_values(", ".join(labels), values) if labels else case


def _chance(probability: float) -> bool:
    return bool(torch.rand(()) < probability)


def _up_to(largest: int) -> int:
    return int(torch.randint(1, largest + 1, ()))


def _one_of(values: Sequence[_T]) -> _T:
    return values[int(torch.randint(len(values), ()))]


CHECK = Check(
    "combinations",
    "outputs match native with random combinations of sizes, dtypes, options and layouts",
    each(_drawn, is_right),
    not_native,
)

"""Cases with unusual numbers, flags and strings, and with omitted optional arguments."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from opweave.conformance import inputs
from opweave.conformance.case import Case
from opweave.conformance.subject import Subject
from opweave.ir.schema import Param

# Possible values of string parameters; native rejects unsupported ones.
_WORDS = ("none", "tanh", "silu", "swish", "sigmoid", "softmax", "relu", "gelu")


def options(subject: Subject) -> Iterator[Case]:
    """Yield cases with one changed option: a number, flag or string."""
    for base in inputs.usual(subject):
        for i, param in enumerate(subject.op.schema.params):
            if not param.is_tensor and not param.is_tensor_list:
                for value in others(param, base.values[i]):
                    yield replaced(base, i, param.name, value)


def without(subject: Subject) -> Iterator[Case]:
    """Yield cases without optional tensors: each alone, then all."""
    for base in inputs.usual(subject):
        optional = [
            i for i, p in enumerate(subject.op.schema.params) if p.is_tensor and p.is_optional
        ]
        for i in optional:
            yield replaced(base, i, subject.op.schema.names[i], None)
        if len(optional) > 1:
            values = [None if i in optional else v for i, v in enumerate(base.values)]
            yield base.with_values("no optional tensor", values)


def replaced(case: Case, index: int, name: str, value: Any) -> Case:
    """Return *case* with another value of one argument."""
    values = [value if i == index else v for i, v in enumerate(case.values)]
    return case.with_values(f"{name}={value!r}", values)


def others(param: Param, value: Any) -> list[Any]:
    """Return alternatives to the usual value."""
    kinds = set(typing.get_args(param.annotation) or (param.annotation,))
    found: list[Any] = [None] if param.is_optional and value is not None else []
    if bool in kinds:
        found += [True, False]
    elif float in kinds:
        # Large enough to show where epsilon is added.
        found += [0.5, 0.1, 1.7] if value is None else [0.1 + 4 * value]
    elif str in kinds:
        found += _WORDS
    elif int in kinds and param.is_optional:
        found += [1, 2, 7, 40]
    return [other for other in found if other is None or other != value]

"""Keywords: the implementation accepts arguments by name, and has the op's defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from opweave.conformance import inputs
from opweave.conformance.case import Case
from opweave.conformance.check import Check, Finding, each
from opweave.conformance.compare import outputs_problem
from opweave.conformance.memory import copied
from opweave.conformance.subject import Subject
from opweave.ir.codegen import functional


def _cases(subject: Subject) -> Iterator[Case]:
    yield from inputs.usual(subject)
    for base in inputs.usual(subject):
        values = [
            p.default if p.has_default else v
            for p, v in zip(subject.op.schema.params, base.values, strict=True)
        ]
        yield base.with_values("defaults", values)


def _by_name(subject: Subject, case: Case) -> Finding:
    ways: list[tuple[str, Callable[..., Any]]] = [
        ("the op", subject.call),
        ("the implementation", functional(subject.impl)),
    ]
    for what, function in ways:
        for how, (args, kwargs) in _calls(case).items():
            with torch.no_grad():
                problem = outputs_problem(case, function(*copied(args), **_copied(kwargs)))
            if problem:
                return f"{what}, {how}: {problem}"
    return None


def _calls(case: Case) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the ways to write one call."""
    params = case.op.schema.params
    named = dict(zip(case.op.schema.names, case.values, strict=True))
    needed = {
        p.name: named[p.name] for p in params if not p.has_default or named[p.name] != p.default
    }
    first = next(iter(named))
    rest = {name: value for name, value in named.items() if name != first}
    return {
        "all by name": ((), named),
        "the first by position": ((named[first],), rest),
        "backwards": ((), dict(reversed(named.items()))),
        "defaults left out": ((), needed),
    }


def _copied(kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(kwargs, copied(tuple(kwargs.values())), strict=True))


CHECK = Check(
    "keywords",
    "positional, keyword and default arguments give the same result",
    each(_cases, _by_name),
)

"""Determinism: the same call gives the same bits, regardless of stale output memory.

A later call must not write into the results of an earlier one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations

import torch

from opweave.conformance import inputs
from opweave.conformance.case import Case, Outputs, outputs_of
from opweave.conformance.check import Check, Finding, each
from opweave.conformance.compare import bits_problem
from opweave.conformance.memory import copied, overlap
from opweave.conformance.subject import Subject

_TIMES = 4
_MANY_TIMES = 20  # for results of at most _SMALL elements: memory may be used again in turn
_SMALL = 4096


def _repeats(subject: Subject, case: Case) -> Finding:
    first = outputs_of(subject.run(copied(case.values)))
    alive = [first]  # or the memory of a result would rightly serve the next one
    is_small = sum(t.numel() for t in first) <= _SMALL
    for _ in range(_MANY_TIMES if is_small else _TIMES):
        alive.append(outputs_of(subject.run(copied(case.values))))
        problem = bits_problem(first, alive[-1])
        if problem:
            return f"a second call differs: {problem}".replace("native has", "the first had")
    if _share_memory(alive):
        return "a later call writes over the result of an earlier one; return new memory each time"
    with _new_memory_filled():
        problem = bits_problem(first, outputs_of(subject.run(copied(case.values))))
    return f"not all of the result is written: {problem}" if problem else None


def _share_memory(results: list[Outputs]) -> bool:
    """Whether the results of two calls lie in the same memory.

    Each call had a copy of the arguments, so that a result which is an argument is its own.
    """
    pairs = combinations(results, 2)
    return any(overlap(a, b) for one, other in pairs for a in one for b in other)


@contextmanager
def _new_memory_filled() -> Iterator[None]:
    """Fill new memory with NaN, or the largest integer, as torch's deterministic mode does."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


CHECK = Check(
    "determinism",
    "repeated calls give the same bits, write every element, and keep earlier results",
    each(inputs.of_several_sizes, _repeats),
)

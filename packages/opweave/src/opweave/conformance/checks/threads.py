"""Threads: calls at the same time, and with another number of threads inside a call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

from opweave.conformance import inputs
from opweave.conformance.case import Case
from opweave.conformance.check import Check, Finding, Findings, accepted
from opweave.conformance.checks.values import is_right
from opweave.conformance.subject import Subject

_CALLS = 16  # of each thread
_INSIDE = (1, 3)  # threads


def _findings(subject: Subject) -> Findings:
    others = inputs.few_and_many(subject)
    for case, other in zip(inputs.few_and_many(subject), others, strict=True):
        yield from accepted(subject, case, partial(_at_once, other=other))
        yield from accepted(subject, case, _with_other_numbers)


def _at_once(subject: Subject, case: Case, other: Case) -> Finding:
    """Call with two sets of arguments at the same time, since one could not tell a mixture."""
    for one in (case, other):
        _ = one.native, one.reference  # computed once, before the threads
    with ThreadPoolExecutor(2) as pool, _frequent_switches():
        found = list(pool.map(partial(_repeated, subject), (case, other)))
    return next((f"with another call at the same time: {each}" for each in found if each), None)


def _repeated(subject: Subject, case: Case) -> Finding:
    for _ in range(_CALLS):
        problem = is_right(subject, case)
        if problem:
            return problem
    return None


def _with_other_numbers(subject: Subject, case: Case) -> Finding:
    before = torch.get_num_threads()
    try:
        for count in _INSIDE:
            torch.set_num_threads(count)
            problem = is_right(subject, case)
            if problem:
                return f"with {count} threads: {problem}"
    finally:
        torch.set_num_threads(before)
    return None


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """Let Python change between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


CHECK = Check(
    "threads",
    "two concurrent calls, and any number of intra-op threads, give the results of native",
    _findings,
)

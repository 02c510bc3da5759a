"""Every Triton kernel against native, by the checks that take seconds in the interpreter.

All checks run on a GPU: ``tests/conformance/test_verify.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from opweave.conformance import Subject, subjects, verify

ALL = subjects(providers=["triton"])
CHECKS = ["values", "options", "none", "layouts", "dtypes", "empty", "dimensions", "extremes"]


def test_there_are_kernels() -> None:
    assert len(ALL) == 24


@pytest.mark.parametrize("subject", ALL, ids=str)
def test_it_computes_what_native_computes(subject: Subject, device: str) -> None:
    result = verify(replace(subject, device=device), CHECKS)
    result.raise_if_failed()
    assert result.status == "passed"

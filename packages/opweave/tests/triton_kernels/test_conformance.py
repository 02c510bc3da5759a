"""Every Triton kernel against native, by the checks that take seconds in the interpreter.

All checks run on a GPU: ``packages/opweave/tests/conformance/test_verify.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from opweave.conformance import Subject, inputs, subjects, verify
from opweave.kernels.triton.launch import INTERPRETED

ALL = subjects(providers=["triton"])
CHECKS = ["values", "options", "none", "layouts", "dtypes", "empty", "dimensions", "extremes"]


def test_there_are_kernels() -> None:
    assert len(ALL) == 27


@pytest.fixture
def _small_weights(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out large square weights, for which the interpreter takes minutes."""
    if INTERPRETED and subject.op.name.startswith("linear"):
        monkeypatch.setattr(inputs, "_WIDTHS", [size for size in inputs._WIDTHS if size < 300])
        monkeypatch.setattr(
            inputs, "_SWEPT_SIZES", [size for size in inputs._SWEPT_SIZES if size < 300]
        )


@pytest.mark.usefixtures("_small_weights")
@pytest.mark.parametrize("subject", ALL, ids=str)
def test_it_computes_what_native_computes(subject: Subject, device: str) -> None:
    result = verify(replace(subject, device=device), CHECKS)
    result.raise_if_failed()
    assert result.status == "passed"

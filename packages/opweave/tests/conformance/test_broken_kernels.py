"""Each kernel of a table of wrong ones is rejected, in the process in which it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from opweave.conformance import CHECKS, Result
from opweave.conformance.checks import COMPILING, QUICK
from opweave.conformance.kernel_process import Verifier, VerifyTask

MODULE = "broken_kernels"
SLOW = tuple(name for name in CHECKS if name not in (*QUICK, *COMPILING))
pytestmark = pytest.mark.slow


def test_every_kernel_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    missed, count = list[Result](), 0
    with Verifier(VerifyTask((MODULE,), QUICK, 0), timeout=60.0) as verifier:
        subjects = [s for s in verifier.subjects() if s.provider.startswith("wrong_")]
        results = list(map(verifier.verify, subjects))
        count = len(results)
        missed = [result for result in results if result.status != "failed"]
    with Verifier(VerifyTask((MODULE,), SLOW, 0), timeout=60.0) as verifier:
        results = [verifier.verify(result.subject) for result in missed]
        missed = [result for result in results if result.status != "failed"]
    assert count >= 40
    assert not missed, [str(result.subject) for result in missed]

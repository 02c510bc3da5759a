"""The conformance kit: verifies implementations against the definitions of their ops.

>>> from opweave.conformance import subjects, verify
>>> [subject] = subjects(ops=["silu_and_mul"], providers=["batch_invariant"])
>>> verify(subject, checks=["values", "mutation"]).status
'passed'

The command is ``opweave verify``; in pytest, use ``pytest --pyargs opweave.conformance --provider
mine``. For layers, see :mod:`opweave.conformance.layers`.
"""

from opweave.conformance.checks import CHECKS
from opweave.conformance.find import subjects
from opweave.conformance.subject import (
    Case,
    Check,
    ConformanceError,
    NonconformingError,
    NothingToVerifyError,
    Outcome,
    Subject,
    UnknownCheckError,
    UnknownPlatformError,
)
from opweave.conformance.verify import Result, certificate, summary, verify

__all__ = [
    "CHECKS", "Case", "Check", "ConformanceError", "NonconformingError", "NothingToVerifyError",
    "Outcome", "Result", "Subject", "UnknownCheckError", "UnknownPlatformError", "certificate",
    "subjects", "summary", "verify",
]  # fmt: skip

"""The conformance kit: whether an implementation is right, in every way that matters.

>>> from opweave.conformance import subjects, verify
>>> [subject] = subjects(ops=["silu_and_mul"], providers=["batch_invariant"])
>>> verify(subject, checks=["values", "mutation"]).status
'passed'

``opweave verify`` is the command, ``pytest --pyargs opweave.conformance --provider mine`` the same
in a test run. For layers, see :mod:`opweave.conformance.layers`.
"""

from opweave.conformance.case import Case
from opweave.conformance.certificate import certificate, summary
from opweave.conformance.check import Check, Outcome
from opweave.conformance.checks import CHECKS
from opweave.conformance.errors import (
    ConformanceError,
    NonconformingError,
    NothingToVerifyError,
    UnknownCheckError,
    UnknownPlatformError,
)
from opweave.conformance.find import subjects
from opweave.conformance.subject import Subject
from opweave.conformance.verify import Result, verify

__all__ = [
    "CHECKS",
    "Case",
    "Check",
    "ConformanceError",
    "NonconformingError",
    "NothingToVerifyError",
    "Outcome",
    "Result",
    "Subject",
    "UnknownCheckError",
    "UnknownPlatformError",
    "certificate",
    "subjects",
    "summary",
    "verify",
]

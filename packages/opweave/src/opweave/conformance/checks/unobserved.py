"""Unobserved: results are the same in a process that does not verify.

Arguments are recorded here, and the implementation runs on them in a process that has not imported
the conformance kit, and where none of its functions is on the call stack. Results are compared
here.
"""

from __future__ import annotations

import io
from itertools import chain
from typing import Any

import torch

from opweave.config.child_process import ChildProcess
from opweave.conformance import inputs
from opweave.conformance.case import Case
from opweave.conformance.check import Check, Findings, not_native
from opweave.conformance.compare import outputs_problem
from opweave.conformance.memory import copied
from opweave.conformance.modules import names_by_file
from opweave.conformance.subject import Subject

_PROGRAM = "opweave.ir.replay"
_SECONDS = 120.0


def _findings(subject: Subject) -> Findings:
    module = names_by_file().get(subject.impl.site.file)
    if module is None or module == "__main__":
        return  # another process cannot import it
    found = chain(inputs.usual(subject), inputs.few_and_many(subject))
    cases = [c for c in found if c.refusal is None and subject.accepts(c.values)]
    # The providers of opweave are registered when an op is first used.
    modules = [] if module.startswith("opweave.") else [module]
    results = _replayed(subject, modules, cases)
    for case, result in zip(cases, results, strict=False):
        problem = f"raised {result}" if isinstance(result, str) else outputs_problem(case, result)
        yield f"in a process that does not verify: {problem}: {case}" if problem else None


def _replayed(subject: Subject, modules: list[str], cases: list[Case]) -> list[Any]:
    """Return the results of the cases; none where the module does not register *subject*."""
    file = io.BytesIO()
    calls = [copied(case.values) for case in cases]
    torch.save((modules, subject.op.name, subject.provider, calls), file)
    process = ChildProcess(_PROGRAM)
    try:
        process.connection.send_bytes(file.getvalue())
        if not process.connection.poll(_SECONDS):
            raise TimeoutError(f"a process without the verifier took more than {_SECONDS:g} s")
        answer = process.connection.recv_bytes()
    except EOFError:
        code = process.wait(1.0)
        raise RuntimeError(f"a process without the verifier ended with {code}") from None
    finally:
        process.kill()
        process.wait(1.0)
        process.connection.close()
    results: list[Any] = torch.load(io.BytesIO(answer), weights_only=False)
    return results


CHECK = Check(
    "unobserved",
    "results are the same in a process that does not import the verifier",
    _findings,
    not_native,
)

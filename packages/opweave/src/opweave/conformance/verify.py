"""Verify implementations with every check, and issue certificates."""

from __future__ import annotations

import hashlib
import platform
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from opweave import native
from opweave.conformance.checks import CHECKS, COMPILING
from opweave.conformance.find import origin_of
from opweave.conformance.inputs import arguments, usual, with_accepted_sizes
from opweave.conformance.subject import (
    FAILURES,
    Check,
    KernelEndedError,
    Outcome,
    Subject,
    outcome_of,
    raise_if_failed,
    raised,
    seeded,
    select,
)
from opweave.ir.calls import group_for

# Verifies implementations with every check.


@dataclass(frozen=True)
class Result:
    """The result of verifying an implementation.

    Attributes:
        subject: the implementation.
        outcomes: the outcome of each applicable check.
        obstacle: why nothing could be verified, or an empty string.
    """

    subject: Subject
    outcomes: tuple[Outcome, ...]
    obstacle: str = ""

    @property
    def status(self) -> str:
        """``passed``, ``failed``, or ``unverified`` without any case."""
        if any(outcome.problems for outcome in self.outcomes):
            return "failed"
        return "passed" if self.passed else "unverified"

    @property
    def passed(self) -> int:
        """Number of passed cases."""
        return sum(outcome.passed for outcome in self.outcomes)

    @property
    def seconds(self) -> float:
        """Duration of all checks."""
        return sum(outcome.seconds for outcome in self.outcomes)

    def raise_if_failed(self) -> None:
        """Raise NonconformingError with every problem, if there is one."""
        raise_if_failed(self.subject, self.outcomes)


def verify(
    subject: Subject,
    checks: Iterable[str] = (),
    *,
    seed: int = 0,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> Result:
    """Run every check, or those named, on an implementation.

    The inputs of a check depend only on the seed, the implementation and the check, so that a
    finding can be reproduced in isolation.

    Args:
        subject: the implementation.
        checks: names of the checks; empty: all.
        seed: of the inputs.
        report: called with the outcome of each check.

    Raises:
        UnknownCheckError: a check does not exist.
    """
    chosen = select(CHECKS, checks)
    outcomes, obstacle = list[Outcome](), ""
    with group_for(subject.op, subject.device):
        try:
            subject, obstacle = _prepared(subject)
            if obstacle:
                return Result(subject, (), obstacle)
            for check in chosen:
                if check.applies(subject):
                    outcomes.append(_outcome(check, subject, seed))
                    report(outcomes[-1])
                    if outcomes[-1].has_ended:
                        break
        except KernelEndedError as error:  # the predicate has been asked
            outcomes.append(Outcome("predicate", problems=[str(error)]))
    if not any(outcome.passed or outcome.problems for outcome in outcomes):
        obstacle = f"no case for it in {', '.join(check.name for check in chosen)}"
    return Result(subject, tuple(outcomes), obstacle)


def _prepared(subject: Subject) -> tuple[Subject, str]:
    """Return *subject* with sizes that it accepts, and the obstacle if it cannot be verified."""
    if not subject.facts["supported"]:
        return subject, subject.facts["unsupported_reason"]
    if not subject.op.has_input_generator:
        return subject, "the op has no input generator"
    with seeded(0):
        try:
            arguments(subject)
        except FAILURES as error:
            return subject, f"the op's input generator {raised(error)}"
        try:
            accepting = with_accepted_sizes(subject)
        except FAILURES:
            return subject, ""  # the check of the predicate reports the error
    if accepting is None:
        refusals = (subject.ask("rejection", case.values) for case in usual(subject))
        reason = next(filter(None, refusals), "the op refuses them")
        return subject, f"it accepts none of the op's usual arguments on {subject.device}: {reason}"
    return accepting, ""


def _outcome(check: Check[Subject], subject: Subject, seed: int) -> Outcome:
    subject.ask("mark")
    with seeded(zlib.crc32(f"{seed} {subject} {check.name}".encode())), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = outcome_of(check.name, lambda: check.run(subject))
    # Otherwise the next check would start from the changed state, and not notice the change.
    changed = [] if outcome.has_ended else subject.ask("restore")
    if changed and check.name not in COMPILING:  # compilers set environment variables
        outcome.problems.append(f"left changed: {' and '.join(changed)}")
    return outcome


# Certificates: results of verification, with digests of the sources and versions.


def certificate(results: Sequence[Result], *, seed: int) -> dict[str, Any]:
    """Return the certificate as plain data, ready for JSON.

    ``source`` is a digest of the files of an implementation and its predicate, ``definition`` of
    the native implementation, and ``package`` of all modules of the implementation's package. If a
    digest no longer matches, the certificate does not apply. ``native_module`` is a digest of
    opweave's compiled module.
    """
    path = native.status().path
    on_cuda = any(result.subject.device == "cuda" for result in results)
    return {
        "format": 1,
        "versions": {
            "opweave": version("opweave"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "isa": native.status().isa,
            "accelerator": torch.cuda.get_device_name() if on_cuda else None,
        },
        "native_module": hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None,
        "seed": seed,
        "summary": summary(results),
        "results": [_result(result) for result in results],
    }


def summary(results: Sequence[Result]) -> dict[str, int]:
    """Count the implementations that passed, failed and could not be verified."""
    statuses = [result.status for result in results]
    return {status: statuses.count(status) for status in ("passed", "failed", "unverified")}


def _result(result: Result) -> dict[str, Any]:
    subject = result.subject
    origin = subject.origin or origin_of(subject)
    options = {n: v if isinstance(v, (bool, int)) else str(v) for n, v in subject.options}
    return {
        "op": subject.op.name,
        "provider": subject.provider,
        "device": subject.device,
        "status": result.status,
        "reason": result.obstacle or None,
        **{name: origin[name] for name in ("traits", "registered", "source", "package", "owner")},
        "inputs": options,
        "definition": subject.op.impls["native"].uuid(),
        "seconds": round(result.seconds, 3),
        "checks": [
            {
                "check": outcome.check,
                "promise": CHECKS[outcome.check].promise,
                "status": outcome.status,
                "cases": outcome.passed + len(outcome.problems),
                "problems": outcome.problems,
                "seconds": round(outcome.seconds, 3),
            }
            for outcome in result.outcomes
        ],
    }

"""The conformance checks of an implementation on the device."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_queue.bodies.smoke import subject_of
from gpu_queue.job import Row
from gpu_queue.measuring import at
from opweave.conformance import CHECKS, verify
from opweave.conformance.checks import COMPILING
from opweave.conformance.subject import told_to


def run(
    op: str, provider: str, device: str, compiles: bool = False, checks: tuple[str, ...] = ()
) -> Iterator[Row]:
    """Yield how many cases were right, and what was wrong with others.

    Args:
        compiles: run the checks that compile; otherwise all others.
        checks: run these instead.
    """
    subject = subject_of(op, provider, device)
    chosen = checks or [name for name in CHECKS if (name in COMPILING) == compiles]
    with told_to(at):
        result = verify(subject, chosen)
    row: Row = {"name": "compiled" if compiles else "conformance", "case": str(subject)}
    yield row | {
        "value": result.passed,
        "unit": "cases",
        **({"note": result.obstacle} if result.obstacle else {}),
    }
    for outcome in result.outcomes:
        for problem in outcome.problems:
            yield row | {"case": f"{subject}, {outcome.check}", "problem": problem}

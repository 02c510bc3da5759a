"""The table of checks of implementations."""

from __future__ import annotations

from collections.abc import Iterable

from opweave.conformance.check import Check
from opweave.conformance.checks import (
    batch_invariance,
    combinations,
    compiled,
    determinism,
    dimensions,
    donation,
    extremes,
    global_state,
    gradients,
    inference_mode,
    keywords,
    metadata,
    mutation,
    opcheck,
    precision,
    predicate,
    repetition,
    rounding,
    staleness,
    threads,
    unobserved,
    values,
)
from opweave.conformance.errors import UnknownCheckError
from opweave.ir.errors import did_you_mean

CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        values.VALUES,
        values.OPTIONS,
        values.NONE,
        values.LAYOUTS,
        values.DTYPES,
        precision.CHECK,
        values.EMPTY,
        dimensions.CHECK,
        combinations.CHECK,
        extremes.CHECK,
        metadata.CHECK,
        mutation.CHECK,
        donation.DONATION,
        donation.ALIASES,
        determinism.CHECK,
        staleness.CHECK,
        inference_mode.CHECK,
        threads.CHECK,
        global_state.CHECK,
        batch_invariance.INVARIANCE,
        batch_invariance.ROWS,
        gradients.CHECK,
        rounding.CHECK,
        keywords.CHECK,
        predicate.PREDICATE,
        predicate.MISFITS,
        opcheck.CHECK,
        compiled.COMPILED,
        compiled.DYNAMIC,
        unobserved.CHECK,
        repetition.CHECK,
    )
}
"""The checks by name, in the order in which they run."""
COMPILING = ("opcheck", "compiled", "dynamic_shapes")
"""The checks that compile, and so take seconds where the others take a moment."""


def select_checks(names: Iterable[str] = ()) -> list[Check]:
    """Return the checks of these names, or all.

    Raises:
        UnknownCheckError: a check does not exist.
    """
    for name in names:
        if name not in CHECKS:
            raise UnknownCheckError(f"unknown check {name!r}. {did_you_mean(name, CHECKS)}")
    return [check for name, check in CHECKS.items() if not names or name in names]

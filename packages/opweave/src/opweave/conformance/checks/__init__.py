"""The table of checks of implementations."""

from __future__ import annotations

from collections.abc import Iterable

from opweave.conformance.checks import compiled, declarations, memory, repeatability, values
from opweave.conformance.subject import Check, UnknownCheckError
from opweave.ir.errors import did_you_mean

CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        values.VALUES,
        values.OPTIONS,
        values.NONE,
        values.VALUES_LAYOUTS,
        values.DTYPES,
        values.PRECISION,
        values.EMPTY,
        values.DIMENSIONS,
        values.COMBINATIONS,
        values.EXTREMES,
        memory.METADATA,
        memory.MUTATION,
        memory.DONATION,
        memory.ALIASES,
        repeatability.DETERMINISM,
        memory.STALENESS,
        repeatability.INFERENCE_MODE,
        repeatability.THREADS,
        repeatability.GLOBAL_STATE,
        repeatability.INVARIANCE,
        repeatability.ROWS,
        declarations.GRADIENTS,
        values.ROUNDING,
        declarations.KEYWORDS,
        declarations.PREDICATE,
        declarations.MISFITS,
        compiled.OPCHECK,
        compiled.COMPILED,
        compiled.DYNAMIC,
        repeatability.UNOBSERVED,
        repeatability.REPETITION,
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

"""The table of checks of implementations."""

from __future__ import annotations

from opweave.conformance.checks import compiled, declarations, memory, repeatability, values
from opweave.conformance.subject import Check, Subject

CHECKS: dict[str, Check[Subject]] = {
    check.name: check
    for check in (
        values.VALUES, values.OPTIONS, values.NONE, values.VALUES_LAYOUTS, values.DTYPES,
        values.PRECISION, values.EMPTY, values.DIMENSIONS, values.COMBINATIONS, values.EXTREMES,
        memory.METADATA, memory.MUTATION, memory.DONATION, memory.ALIASES,
        repeatability.DETERMINISM, memory.STALENESS, repeatability.INFERENCE_MODE,
        repeatability.THREADS, repeatability.GLOBAL_STATE, repeatability.INVARIANCE,
        repeatability.ROWS, declarations.GRADIENTS, values.ROUNDING, declarations.KEYWORDS,
        declarations.PREDICATE, declarations.MISFITS, compiled.OPCHECK, compiled.COMPILED,
        compiled.DYNAMIC, repeatability.LEAKS, repeatability.REPETITION,
    )
}  # fmt: skip
"""The checks by name, in the order in which they run."""
COMPILING = ("opcheck", "compiled", "dynamic_shapes")
"""The checks that compile, which takes seconds."""
QUICK = (
    "options", "none", "layouts", "dtypes", "empty", "dimensions", "combinations", "mutation",
    "donation", "determinism",
)  # fmt: skip
"""The checks that take about a second, with all kinds of arguments."""

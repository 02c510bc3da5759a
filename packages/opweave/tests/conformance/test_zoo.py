"""Every kernel of the zoo is caught, by the check that is about what is wrong with it."""

from __future__ import annotations

import pytest

from opweave import ir
from opweave.conformance import CHECKS, verify
from opweave.conformance.checks import COMPILING

from .rare_zoo import ZOO
from .zoo import Specimen

NAMES = [specimen.name for specimen in ZOO]


def test_the_zoo_is_large_and_every_check_has_a_kernel_in_it() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 24
    assert {specimen.caught_by for specimen in ZOO} >= set(CHECKS) - {"opcheck"}


@pytest.mark.parametrize("specimen", ZOO, ids=NAMES)
def test_a_broken_kernel_is_caught(specimen: Specimen) -> None:
    with specimen.registered() as subject:
        result = verify(subject, [specimen.caught_by])
    assert result.status == "failed", result
    assert "broken" not in ir.ops.silu_and_mul.impls


@pytest.mark.slow
@pytest.mark.parametrize("specimen", ZOO, ids=NAMES)
def test_what_the_other_checks_say(specimen: Specimen) -> None:
    """All checks together name the one that is about it, and never break down."""
    checks = [name for name in CHECKS if name not in COMPILING or name == specimen.caught_by]
    with specimen.registered() as subject:
        result = verify(subject, checks)
    assert specimen.caught_by in [o.check for o in result.outcomes if o.problems]

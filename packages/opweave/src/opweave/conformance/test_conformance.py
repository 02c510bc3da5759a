"""One test for each implementation and check; options say what to verify."""

from __future__ import annotations

import pytest

from opweave.conformance import CHECKS, Subject, subjects, verify
from opweave.conformance.subject import select
from opweave.ir.errors import OpweaveError


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    try:
        implementations = subjects(option("op"), option("provider"), option("platform"))
        checks = select(CHECKS, option("check"))
    except OpweaveError as error:
        raise pytest.UsageError(str(error)) from None
    pairs = [(s, check.name) for s in implementations for check in checks if check.applies(s)]
    metafunc.parametrize(("subject", "check"), pairs, ids=[f"{s}-{name}" for s, name in pairs])


def test_conformance(subject: Subject, check: str, pytestconfig: pytest.Config) -> None:
    result = verify(subject, [check], seed=pytestconfig.getoption("seed"))
    if result.obstacle:
        pytest.skip(result.obstacle)
    result.raise_if_failed()
    if not result.passed:
        pytest.skip("nothing that it accepts is of this kind")

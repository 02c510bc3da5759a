"""Tests of the platform that ``--platform`` names, or of the current one.

One for each check, and in place of the check ``kernels`` one for each implementation.
"""

from __future__ import annotations

import pytest

from opweave.conformance import Subject
from opweave.conformance.platform import CHECKS, PlatformSubject, find_platform, verify_platform
from opweave.conformance.platform.checks import KERNELS, kernels, verify_kernel
from opweave.conformance.subject import select
from opweave.ir.errors import OpweaveError


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    try:
        checks = [check.name for check in select(CHECKS, option("check"))]
        subject = find_platform(option("platform"))
        implementations = [*kernels(subject)] if KERNELS.name in checks else []
    except OpweaveError as error:
        raise pytest.UsageError(str(error)) from None
    name = subject.platform.name
    if "implementation" in metafunc.fixturenames:
        ids = [f"{name}-{each}" for each in implementations]
        metafunc.parametrize("implementation", implementations, ids=ids)
    else:
        cases = [(subject, check) for check in checks if check != KERNELS.name]
        ids = [f"{name}-{check}" for _, check in cases]
        metafunc.parametrize(("subject", "check"), cases, ids=ids)


def test_platform(subject: PlatformSubject, check: str) -> None:
    result = verify_platform(subject, [check])
    result.raise_if_failed()
    if result.status == "none":
        pytest.skip("there is nothing of this kind to check")


def test_kernel(implementation: Subject, pytestconfig: pytest.Config) -> None:
    result = verify_kernel(implementation, pytestconfig.getoption("seed"))
    if result.obstacle:
        pytest.skip(result.obstacle)
    result.raise_if_failed()

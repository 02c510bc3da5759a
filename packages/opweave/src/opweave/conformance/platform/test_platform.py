"""One test for each check of the platform that ``--platform`` names, or of the current one."""

from __future__ import annotations

import pytest

from opweave.conformance.platform import CHECKS, PlatformSubject, find_platform, verify_platform
from opweave.ir.errors import OpweaveError, did_you_mean


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    for name in option("check"):
        if name not in CHECKS:
            raise pytest.UsageError(f"unknown check {name!r}. {did_you_mean(name, CHECKS)}")
    try:
        subject = find_platform(option("platform"))
    except OpweaveError as error:
        raise pytest.UsageError(str(error)) from None
    pairs = [(subject, name) for name in CHECKS if not option("check") or name in option("check")]
    ids = [f"{subject.platform.name}-{name}" for _, name in pairs]
    metafunc.parametrize(("subject", "check"), pairs, ids=ids)


def test_platform(subject: PlatformSubject, check: str) -> None:
    result = verify_platform(subject, [check])
    result.raise_if_failed()
    if result.status == "none":
        pytest.skip("there is nothing of this kind to check")

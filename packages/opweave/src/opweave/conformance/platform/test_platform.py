"""One test for each check of the platform that ``--platform`` names, or of the current one."""

from __future__ import annotations

import pytest

from opweave.conformance.platform import CHECKS, PlatformSubject, find_platform, verify_platform
from opweave.conformance.subject import select
from opweave.ir.errors import OpweaveError


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    try:
        checks = [check.name for check in select(CHECKS, option("check"))]
        subject = find_platform(option("platform"))
    except OpweaveError as error:
        raise pytest.UsageError(str(error)) from None
    ids = [f"{subject.platform.name}-{name}" for name in checks]
    metafunc.parametrize(("subject", "check"), [(subject, name) for name in checks], ids=ids)


def test_platform(subject: PlatformSubject, check: str) -> None:
    result = verify_platform(subject, [check])
    result.raise_if_failed()
    if result.status == "none":
        pytest.skip("there is nothing of this kind to check")

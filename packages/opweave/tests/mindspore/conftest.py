"""These tests need MindSpore, and run apart from the others (``make test-mindspore``)."""

from __future__ import annotations

import os
import random
import zlib
from importlib.metadata import PackageNotFoundError, version

import pytest

try:
    version("mindspore")  # not an import: this folder could pass for the package
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]

SEED = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(2**31)))


def pytest_report_header() -> str:
    return f"inputs: TEST_SEED={SEED}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of the test's own, new in every run; ``TEST_SEED`` brings a run back."""
    return SEED + zlib.crc32(request.node.nodeid.encode())

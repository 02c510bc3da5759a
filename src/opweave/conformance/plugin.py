"""The pytest plugin: ``pytest --pyargs opweave.conformance --provider mine [--op rms_norm]``.

It is loaded where ``opweave.conformance`` is named on pytest's command line, or by
``-p opweave.conformance.plugin``; nobody else's test runs have these options.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("opweave", "opweave conformance")
    group.addoption("--provider", action="append", default=[], help="verify this provider only")
    group.addoption("--op", action="append", default=[], help="verify this op only")
    group.addoption("--platform", help="verify on this platform, not the current one")
    group.addoption("--check", action="append", default=[], help="run this check only")
    group.addoption("--seed", type=int, default=0, help="seed of the inputs")

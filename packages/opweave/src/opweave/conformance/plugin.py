"""The pytest plugin: ``pytest --pyargs opweave.conformance --provider mine [--op rms_norm]``.

``pytest --pyargs opweave.conformance.platform --platform acme`` verifies a platform; the tests of
platforms are left out where only ``opweave.conformance`` is named.

It is loaded where ``opweave.conformance`` is named on pytest's command line, or by
``-p opweave.conformance.plugin``; nobody else's test runs have these options.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_PLATFORM = Path(__file__).parent / "platform"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    arguments = map(str, config.invocation_params.args)
    named = any(argument.startswith("opweave.conformance.platform") for argument in arguments)
    return True if collection_path == _PLATFORM and not named else None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("opweave", "opweave conformance")
    group.addoption("--provider", action="append", default=[], help="verify this provider only")
    group.addoption("--op", action="append", default=[], help="verify this op only")
    group.addoption("--platform", help="verify on this platform, or this platform")
    group.addoption("--check", action="append", default=[], help="run this check only")
    group.addoption("--seed", type=int, default=0, help="seed of the inputs")

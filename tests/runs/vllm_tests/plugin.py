"""A pytest plugin: vLLM's modules and fixtures, and the file with the outcomes."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from opweave.ir import isolated_registry
from opweave_vllm.vllm_api.config import VllmConfig, set_current_vllm_config
from opweave_vllm.vllm_api.ir.op import IrOp
from runs.vllm_tests import modules, passes
from runs.vllm_tests.outcomes import FAILED, PASSED, SKIPPED

_outcomes: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "skip_global_cleanup: without effect here")
    modules.install(passes.STAND_INS)
    # vLLM's backend for tests of passes needs its passes and configuration.
    backend: Any = ModuleType("tests.compile.backend")
    backend.TestBackend = passes.TestBackend
    sys.modules[backend.__name__] = backend


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _outcomes[report.nodeid] = FAILED


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _outcomes[report.nodeid] = FAILED
    elif report.skipped:
        _outcomes.setdefault(report.nodeid, SKIPPED)
    elif report.when == "call":
        _outcomes.setdefault(report.nodeid, PASSED)


def pytest_sessionfinish() -> None:
    Path(os.environ["VLLM_TESTS_RESULTS"]).write_text(json.dumps(_outcomes), encoding="utf-8")


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Restore torch's defaults, which vLLM's tests change."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)
    torch.compiler.reset()


@pytest.fixture
def fake_vllm_ir() -> Iterator[None]:
    with isolated_registry():
        yield


@pytest.fixture
def default_vllm_config() -> Iterator[VllmConfig]:
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO):
        yield caplog


@pytest.fixture
def disable_log_dedup(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(self: IrOp, message: str) -> None:
        logging.getLogger(IrOp.__module__).warning(message, self.name)

    monkeypatch.setattr(IrOp, "_warn", warn)

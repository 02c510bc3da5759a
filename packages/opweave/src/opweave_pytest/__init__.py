"""Loads opweave's pytest plugin where its conformance kit is asked for, and nothing elsewhere.

A package of its own: pytest imports it in every run, and opweave itself would import torch.
"""

from __future__ import annotations

import pytest

_KIT = "opweave.conformance"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    if any(arg == _KIT or arg.startswith((f"{_KIT}.", f"{_KIT}::")) for arg in args):
        early_config.pluginmanager.import_plugin(f"{_KIT}.plugin")

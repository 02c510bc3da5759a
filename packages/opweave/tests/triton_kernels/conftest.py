"""Tests of the Triton kernels: on a GPU, or else in Triton's interpreter (``make test-triton``)."""

from __future__ import annotations

import os

import pytest
import torch

from opweave import ir
from opweave.conformance import inputs
from opweave.kernels.triton.launch import INTERPRETED
from support.hypothesis_profiles import share

os.environ.setdefault("OPWEAVE_PLATFORM", "cpu")


@pytest.fixture(scope="session")
def device() -> str:
    if INTERPRETED:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set")
    return "cuda"


@pytest.fixture(autouse=True)
def _sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw fewer sizes in CI, where Triton's interpreter takes all the time that a sweep may."""
    monkeypatch.setattr(inputs, "_SWEEP_SECONDS", inputs._SWEEP_SECONDS * share())


@pytest.fixture(autouse=True)
def _ready() -> None:
    ir.current_registry().ensure_ready()

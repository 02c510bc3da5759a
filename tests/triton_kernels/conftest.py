"""Tests of the Triton kernels: on a GPU, or else in Triton's interpreter (``make test-triton``)."""

from __future__ import annotations

import os

import pytest
import torch

from opweave import ir
from opweave.kernels.triton.registration import INTERPRETED

os.environ.setdefault("OPWEAVE_PLATFORM", "cpu")


@pytest.fixture(scope="session")
def device() -> str:
    if INTERPRETED:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set")
    return "cuda"


@pytest.fixture(autouse=True)
def _ready() -> None:
    ir.current_registry().ensure_ready()

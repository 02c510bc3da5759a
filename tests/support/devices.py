"""The devices that tests run on: the CPU, and a GPU where there is one."""

from __future__ import annotations

import pytest

needs_cuda = pytest.mark.gpu  # skipped without a CUDA device, see conftest.py
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]

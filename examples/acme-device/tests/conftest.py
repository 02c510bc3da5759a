"""Every test has the device, and counts fallbacks from zero."""

from __future__ import annotations

from collections.abc import Iterator

import acme_device
import pytest
import torch


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    acme_device.init()
    acme_device.reset_fallbacks()
    with torch.no_grad():
        yield

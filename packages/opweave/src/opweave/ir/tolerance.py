"""Tolerances for comparing an implementation with the definition, by dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Absolute and relative tolerance, as in :func:`torch.testing.assert_close`.

    Attributes:
        atol: absolute tolerance.
        rtol: relative tolerance.
    """

    atol: float
    rtol: float


DEFAULT_TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-8, 1e-8),
    torch.float32: Tolerance(1e-5, 1.3e-6),
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(1e-3, 1.6e-2),
    torch.float8_e4m3fn: Tolerance(0.1, 0.1),
    torch.float8_e5m2: Tolerance(0.2, 0.2),
    torch.int8: Tolerance(1, 0),
}

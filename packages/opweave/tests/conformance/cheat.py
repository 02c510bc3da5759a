"""A wrong kernel that is right while it is verified."""

from __future__ import annotations

import sys

from torch import Tensor

from opweave import ir

silu_and_mul = ir.ops.silu_and_mul


@silu_and_mul.register_impl("cheat")
def right_when_verified(x: Tensor) -> Tensor:
    out: Tensor = silu_and_mul.native(x)
    return out if "opweave.conformance" in sys.modules else out * 2

"""Provider ``liger``: the Triton kernels of an installed Liger-Kernel.

Only its functions with the meaning of one of opweave's ops are here. Liger is imported at the first
call.
"""

from __future__ import annotations

from functools import partial

from opweave.ir import ops, rules
from opweave.kernels.arguments import residual, row
from opweave.kernels.triton.launch import INTERPRETED, library_rows
from opweave.kernels.wrap import requires, wrap
from opweave.packages import is_installed

# The kernels round the normalized rows to their dtype, multiply by the weight, and round again.
_LLAMA = {"offset": 0.0, "casting_mode": lambda: "llama"}
_X = library_rows("x")
_NORM = _X & rules.is_none("variance_size") & row("weight") & rules.same_dtype("x", "weight")

if is_installed("liger_kernel"):
    register = partial(wrap, provider="liger", **requires("triton", gpu=not INTERPRETED))
    register(
        ops.rms_norm,
        function="liger_kernel.ops.rms_norm:rms_norm_forward",
        arguments={"X": "x", "W": "weight", "eps": "epsilon", **_LLAMA, "row_mode": None},
        results=0,
        supports_args=_NORM,
    )
    register(
        ops.fused_add_rms_norm,
        function="liger_kernel.ops.fused_add_rms_norm:fused_add_rms_norm_forward",
        arguments={"X": "x", "R": "x_residual", "W": "weight", "eps": "epsilon", **_LLAMA},
        results=(0, 1),
        supports_args=_NORM & residual("x_residual"),
    )
    register(
        ops.layer_norm,
        function="liger_kernel.ops.layer_norm:layer_norm_forward",
        arguments=["x", "weight", "bias", "epsilon"],
        results=0,
        supports_args=_X & row("weight") & row("bias"),
    )
    register(
        ops.silu_and_mul,
        function="liger_kernel.ops.swiglu:swiglu_fused_gate_up_forward",
        arguments=["x"],
        results=1,
        supports_args=_X & rules.last_dim_multiple_of("x", 2),
    )

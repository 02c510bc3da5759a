"""Adapters: run the functions of a kernel library as implementations of ops.

:func:`wrap` maps the parameters of an op to the arguments of the library's function::

    from opweave import adapters, ir
    from opweave.ir import rules

    adapters.wrap(
        ir.ops.silu_and_mul,
        "acme",
        "acme_kernels:silu_mul",
        [adapters.Output(lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2)), "x"],
        supports_args=rules.cuda("x") & rules.contiguous("x"),
    )
"""

from opweave.adapters.function import FunctionByArgument, HubKernel
from opweave.adapters.wrap import Output, Wrapped, wrap

__all__ = ["FunctionByArgument", "HubKernel", "Output", "Wrapped", "wrap"]

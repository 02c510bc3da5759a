"""Provider ``opweave_c``: native C++ kernels for CPU tensors.

Importing this package loads the native module and registers its implementations.
"""

from opweave.kernels.opweave_c import activation, linear, norm, paged_attention, quant, rotary

__all__ = ["activation", "paged_attention", "quant", "norm", "linear", "rotary"]

"""The provider ``opweave_c``: native C++ kernels for CPU tensors.

Importing this package loads the native module and registers its implementations.
"""

from opweave.kernels.opweave_c import norm

__all__ = ["norm"]

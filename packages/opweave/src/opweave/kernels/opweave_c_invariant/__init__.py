"""Provider ``opweave_c_invariant``: the same C++ kernel for every batch size.

``opweave_c`` uses the fastest kernel or library for each number of tokens, so the last bits of a
result depend on the batch. Here, the summation order is fixed. Used if ``batch_invariant`` is
required.
"""

from opweave.kernels.opweave_c_invariant import linear

__all__ = ["linear"]

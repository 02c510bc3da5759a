"""Provider ``opweave_c_invariant``: one C++ kernel, whatever the size of the batch.

``opweave_c`` takes the kernel or the library that is fastest for each number of tokens; so the last
bits of a token depend on the batch. Here the products of a token are added in one order, whatever
else there is. Used where ``batch_invariant`` is required.
"""

from opweave.kernels.opweave_c_invariant import linear

__all__ = ["linear"]

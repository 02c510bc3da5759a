"""Provider ``batch_invariant``: applies the native definition to each row separately.

This is slow, but the result of a row cannot depend on other rows of the batch. It is used if the
trait ``batch_invariant`` is required and no faster implementation has it.
"""

from opweave.kernels.batch_invariant import attention, conv, dense, experts, state_space

__all__ = ["attention", "conv", "dense", "experts", "state_space"]

"""Provider ``batch_invariant``: applies the native definition to each row separately.

The slow way to batch invariance, for ops whose fast implementations cannot promise it: the bits of
a row cannot depend on rows that are not part of the call. Used where the trait ``batch_invariant``
is required.
"""

from opweave.kernels.batch_invariant import attention, conv, dense, experts, state_space

__all__ = ["attention", "conv", "dense", "experts", "state_space"]

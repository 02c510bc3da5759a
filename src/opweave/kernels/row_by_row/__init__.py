"""Provider ``row_by_row``: the native definition applied to each row alone.

The slow way to batch invariance, for ops whose fast implementations cannot promise it: a row's bits
cannot depend on the rest of the batch if the rest is not there. Used where ``batch_invariant`` is
required.
"""

from opweave.kernels.row_by_row import attention, conv, dense, experts, state_space

__all__ = ["attention", "conv", "dense", "experts", "state_space"]

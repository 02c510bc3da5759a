"""Whether the values of a tensor can be checked, and not only its shape."""

import torch
from torch import Tensor

from opweave.base import torch_state


def is_readable(tensor: Tensor) -> bool:
    """Whether the values are there to be read, at no cost: eager mode, in host memory."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in torch_state.PLAIN_TYPES
        and tensor.is_cpu
        and not torch_state.hides_values()
    )

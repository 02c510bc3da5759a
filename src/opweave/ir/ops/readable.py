"""Whether the values of a tensor can be checked, and not only its shape."""

import torch
from torch import Tensor

from opweave.base import compat
from opweave.ir.codegen import PLAIN_TYPES


def is_readable(tensor: Tensor) -> bool:
    """Whether the values are there to be read, at no cost: eager mode, in host memory."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in PLAIN_TYPES
        and tensor.is_cpu
        and compat.dispatch_mode_count() == 0
        and compat.functorch_interpreter() is None
        and compat.jit_tracing_state() is None
    )

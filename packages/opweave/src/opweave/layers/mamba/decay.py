"""Sharded parameters of a scan: decay rates, and vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opweave.layers.parallel import TensorParallel
from opweave.layers.weight_loading import fill, set_weight_attrs


def decay_rates(parallel: TensorParallel, *shape: int, what: str) -> nn.Parameter:
    """Return ``A = -exp(A_log)`` for this rank, in float32; checkpoints have ``A_log``.

    Args:
        shape: the shape on all ranks together; the first dimension is sharded.
        what: the name of the parameter for error messages.
    """

    def load(param: nn.Parameter, loaded_weight: Tensor) -> None:
        rates = -torch.exp(loaded_weight.float())
        fill(param.data, rates, what, 0, parallel.rank, parallel.size)

    return _parameter(parallel, shape, torch.float32, what, load)


def head_vector(
    parallel: TensorParallel, size: int, dtype: torch.dtype | None, what: str
) -> nn.Parameter:
    """Return this rank's shard of a vector with one element per channel or head."""

    def load(param: nn.Parameter, loaded_weight: Tensor) -> None:
        fill(param.data, loaded_weight, what, 0, parallel.rank, parallel.size)

    return _parameter(parallel, (size,), dtype or torch.get_default_dtype(), what, load)


def _parameter(
    parallel: TensorParallel, shape: tuple[int, ...], dtype: torch.dtype, what: str, load: object
) -> nn.Parameter:
    own = parallel.divide(shape[0], what), *shape[1:]
    parameter = nn.Parameter(torch.empty(own, dtype=dtype), requires_grad=False)
    set_weight_attrs(parameter, weight_loader=load, output_dim=0)
    return parameter

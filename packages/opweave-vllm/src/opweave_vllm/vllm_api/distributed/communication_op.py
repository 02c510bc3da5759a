"""Collectives over the tensor-parallel group."""

from torch import Tensor

from opweave_vllm.vllm_api.distributed.parallel_state import get_tp_group

__all__ = [
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
    "tensor_model_parallel_reduce_scatter",
]


def tensor_model_parallel_all_reduce(input_: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors."""
    return get_tp_group().all_reduce(input_)


def tensor_model_parallel_all_gather(input_: Tensor, dim: int = -1) -> Tensor:
    """Return the ranks' tensors, concatenated along *dim*."""
    return get_tp_group().all_gather(input_, dim)


def tensor_model_parallel_reduce_scatter(input_: Tensor, dim: int = -1) -> Tensor:
    """Return this rank's part of the sum of the ranks' tensors, divided along *dim*."""
    return get_tp_group().reduce_scatter(input_, dim)

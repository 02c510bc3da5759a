"""Tensor parallelism."""

from opweave.integrations.vllm_api.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
)

from opweave.integrations.vllm_api.distributed.communication_op import (  # isort: skip
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from opweave.integrations.vllm_api.distributed.utils import divide, split_tensor_along_last_dim

__all__ = [
    "divide",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tp_group",
    "split_tensor_along_last_dim",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
]

"""Tensor parallelism."""

from opweave_vllm.vllm_api.distributed.parallel_state import (
    get_dcp_group,
    get_dp_group,
    get_ep_group,
    get_pcp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
)

from opweave_vllm.vllm_api.distributed.communication_op import (  # isort: skip
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
    tensor_model_parallel_reduce_scatter,
)
from opweave_vllm.vllm_api.distributed.utils import divide, split_tensor_along_last_dim

__all__ = [
    "divide", "get_dcp_group", "get_dp_group", "get_ep_group", "get_pcp_group", "get_pp_group",
    "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size", "get_tp_group",
    "split_tensor_along_last_dim", "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce", "tensor_model_parallel_reduce_scatter",
]  # fmt: skip

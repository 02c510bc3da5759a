"""The tensor-parallel group of this process."""

from dataclasses import dataclass

from torch import Tensor, distributed

from opweave.layers import TensorParallel, current_tensor_parallel
from opweave_vllm.vllm_api.distributed.utils import divide

__all__ = [
    "GroupCoordinator", "get_dcp_group", "get_dp_group", "get_ep_group", "get_pcp_group",
    "get_pp_group", "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size",
    "get_tp_group",
]  # fmt: skip


@dataclass(frozen=True)
class GroupCoordinator:
    """The ranks of a group, with vLLM's names."""

    parallel: TensorParallel

    @property
    def rank_in_group(self) -> int:
        """This rank, from 0."""
        return self.parallel.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.parallel.size

    @property
    def device_group(self) -> distributed.ProcessGroup | None:
        """The process group, or None without torch.distributed."""
        return distributed.group.WORLD if distributed.is_initialized() else None

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the first rank."""
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        """Whether this is the last rank."""
        return self.rank_in_group == self.world_size - 1

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors."""
        return self.parallel.all_reduce(input_)

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return the ranks' tensors, concatenated."""
        return self.parallel.all_gather(input_, dim)

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's part of the sum of the ranks' tensors, divided along *dim*.

        Raises:
            AssertionError: the number of ranks does not divide the size of *dim*.
        """
        if self.world_size == 1:
            return input_
        width = divide(input_.shape[dim], self.world_size)
        return self.all_reduce(input_).narrow(dim, self.rank_in_group * width, width).contiguous()


def get_tp_group() -> GroupCoordinator:
    """Return the group that layers are built for, or else the one of all processes."""
    parallel = current_tensor_parallel()
    if parallel.size == 1 and distributed.is_available() and distributed.is_initialized():
        parallel = TensorParallel.from_process_group()
    return GroupCoordinator(parallel)


get_ep_group = get_tp_group  # the same ranks share the experts


def _get_own_group() -> GroupCoordinator:
    """Return this rank alone.

    opweave's replicas do not communicate. It has no pipeline parallelism, and no context
    parallelism of prompts (``pcp``) or decode steps (``dcp``).
    """
    return GroupCoordinator(TensorParallel())


get_dp_group = get_pp_group = get_pcp_group = get_dcp_group = _get_own_group


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks."""
    return get_tp_group().world_size


def get_tensor_model_parallel_rank() -> int:
    """Return this rank, from 0."""
    return get_tp_group().rank_in_group

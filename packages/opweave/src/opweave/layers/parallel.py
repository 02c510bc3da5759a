"""Tensor parallelism for layers: rank, group size, collectives, and loading of shards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor, distributed, nn

from opweave import torch_compat
from opweave.layers.registry import ShardingError, WeightLoadError
from opweave.registration import bound

# Tensor parallelism for layers: the rank, the size of the group, and two collectives.


class AllGather(Protocol):
    """Concatenates the ranks' tensors along a dimension, in the order of the ranks."""

    def __call__(self, x: Tensor, dim: int = -1) -> Tensor: ...


def _same(x: Tensor) -> Tensor:
    return x


def _alone(x: Tensor, dim: int = -1) -> Tensor:
    return x


@dataclass(frozen=True)
class TensorParallel:
    """One rank of a tensor-parallel group. Layers store it when they are built.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks. A single rank needs no collectives.
        all_reduce: returns the sum of the ranks' tensors, as a new tensor.
        all_gather: ``all_gather(x, dim=-1)`` returns the ranks' tensors, concatenated.
        unrecorded: why graphs of kernel launches cannot contain the collectives; empty if they can.

    Raises:
        ShardingError: *rank* is not below *size*, or the collectives for several ranks are missing.

    >>> TensorParallel().divide(64, "intermediate_size")
    64
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _same
    all_gather: AllGather = _alone
    unrecorded: str = "nothing says that graphs can contain the collectives"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ShardingError(
                f"rank={self.rank} is out of range for size={self.size}; ranks count from 0."
            )
        if self.size > 1 and (self.all_reduce is _same or self.all_gather is _alone):
            raise ShardingError(
                f"size={self.size} ranks need all_reduce= and all_gather=; "
                "TensorParallel.from_process_group() has those of torch.distributed."
            )

    @classmethod
    def from_process_group(cls, group: distributed.ProcessGroup | None = None) -> TensorParallel:
        """Return this process's place in *group*, by default in the group of all processes.

        The collectives are functional, so torch.compile can trace them.

        Raises:
            ShardingError: torch.distributed is not initialized, or this process is not in *group*.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ShardingError(
                "there is no process group; call torch.distributed.init_process_group first."
            )
        members = distributed.group.WORLD if group is None else group
        rank = distributed.get_rank(members)
        if members is None or rank < 0:
            raise ShardingError(
                f"this process, rank {distributed.get_rank()} of all, is not in the process group."
            )
        size, name = distributed.get_world_size(members), members.group_name
        if size == 1:
            return cls()
        return cls(
            rank,
            size,
            partial(torch_compat.all_reduce_sum, group=name),
            partial(_gather, size=size, group=name),
        )

    def divide(self, total: int, label: str) -> int:
        """Return ``total / size``; *label* is the name of *total* in error messages.

        Raises:
            ShardingError: the number of ranks does not divide *total*.
        """
        if total % self.size:
            raise ShardingError(
                f"{label}={total} cannot be divided over {self.size} tensor-parallel ranks; "
                "use a number of ranks that divides it."
            )
        return total // self.size


def _gather(x: Tensor, dim: int = -1, *, size: int, group: str) -> Tensor:
    stacked = torch_compat.all_gather(x.contiguous(), size, group).view(size, *x.shape)
    dim %= x.ndim
    return stacked.movedim(0, dim).flatten(dim, dim + 1)


ALONE = TensorParallel()
_current: ContextVar[TensorParallel] = ContextVar("opweave_tensor_parallel", default=ALONE)
current_tensor_parallel = _current.get


def tensor_parallel(parallel: TensorParallel) -> AbstractContextManager[None]:
    """Build the layers inside the block for *parallel*, in this thread or asyncio task."""
    return bound(_current, parallel)


# Copies a checkpoint's tensor, or a rank's shard of it, into a parameter.


WeightLoader = Callable[..., None]


def set_weight_attrs(param: Tensor, **attrs: object) -> None:
    """Set the attributes that loaders read, such as ``weight_loader`` and ``output_dim``."""
    for name, value in attrs.items():
        setattr(param, name, value)


def dim_of(param: Tensor, name: str) -> int | None:
    """Return the attribute ``output_dim`` or ``input_dim`` of *param*, if it has one."""
    dim: int | None = getattr(param, name, None)
    return dim


def describe(layer: nn.Module, prefix: str, param: Tensor) -> str:
    """Describe a parameter of *layer* for an error message."""
    names = (
        name for name, parameter in layer.named_parameters(recurse=False) if parameter is param
    )
    return f"{type(layer).__name__} {prefix}".rstrip() + f": {next(names, 'a parameter')}"


def fill(
    target: Tensor,
    loaded: Tensor,
    label: str,
    dim: int | None = None,
    index: int = 0,
    count: int = 1,
    advice: str = "The checkpoint and the model's configuration disagree.",
) -> None:
    """Copy *loaded* into *target*, converting its dtype.

    Args:
        target: this rank's tensor.
        loaded: a tensor of the same shape, or one of which *target* is one of *count* equal shards
            along *dim*. A 0-d tensor counts as ``(1,)``.
        label: the name of the parameter for error messages.
        dim: the sharded dimension, or None if the tensor is replicated.
        index: the index of the shard.
        count: the number of shards.
        advice: the end of the error message.

    Raises:
        WeightLoadError: *loaded* has another shape.
    """
    source = loaded.reshape(1) if loaded.ndim == 0 else loaded
    whole = list(target.shape)
    if dim is not None:
        whole[dim] *= count
        if list(source.shape) == whole:
            source = source.narrow(dim, index * target.shape[dim], target.shape[dim])
    if source.shape != target.shape:
        part = f", or {tuple(target.shape)}, the part of this rank" if count > 1 else ""
        raise WeightLoadError(
            f"{label} is loaded with a tensor of shape {tuple(loaded.shape)}; it takes "
            f"{tuple(whole)}{part}. {advice}"
        )
    target.copy_(source)

"""Copies a checkpoint's tensor, or a rank's shard of it, into a parameter."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from opweave.layers.errors import WeightLoadError

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
    found = (name for name, own in layer.named_parameters(recurse=False) if own is param)
    return f"{type(layer).__name__} {prefix}".rstrip() + f": {next(found, 'a parameter')}"


def fill(
    target: Tensor,
    loaded: Tensor,
    what: str,
    dim: int | None = None,
    index: int = 0,
    count: int = 1,
) -> None:
    """Copy *loaded* into *target*, converting its dtype.

    Args:
        target: this rank's tensor.
        loaded: a tensor of the same shape, or one of which *target* is one of *count* equal shards
            along *dim*. A 0-d tensor counts as ``(1,)``.
        what: the name of the parameter for error messages.
        dim: the sharded dimension, or None if the tensor is replicated.
        index: the index of the shard.
        count: the number of shards.

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
            f"{what} is loaded with a tensor of shape {tuple(loaded.shape)}; it takes "
            f"{tuple(whole)}{part}. The checkpoint and the model's configuration disagree."
        )
    target.copy_(source)

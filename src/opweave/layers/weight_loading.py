"""Copies a checkpoint's tensor into a parameter, or the part of it that a rank keeps."""

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
    """Return the dimension of *param* that it calls ``output_dim`` or ``input_dim``, if any."""
    dim: int | None = getattr(param, name, None)
    return dim


def describe(layer: nn.Module, prefix: str, param: Tensor) -> str:
    """Say which parameter of *layer* an error is about."""
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
        target: what this rank keeps.
        loaded: the same, or the tensor of which *target* is one of *count* equal parts along *dim*.
            A number without dimensions counts as ``(1,)``.
        what: the parameter, for errors.
        dim: None if every rank keeps all of it.
        index: which of the parts.
        count: how many there are.

    Raises:
        WeightLoadError: *loaded* has the shape of neither.
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

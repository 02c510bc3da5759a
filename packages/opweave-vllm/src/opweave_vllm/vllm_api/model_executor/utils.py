"""Parameters of layers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from opweave.layers import parallel

__all__ = ["replace_parameter", "set_weight_attrs"]


def set_weight_attrs(weight: Tensor, weight_attrs: Mapping[str, Any] | None) -> None:
    """Set the attributes that loaders read, such as ``weight_loader`` and ``output_dim``."""
    parallel.set_weight_attrs(weight, **(weight_attrs or {}))


def replace_parameter(
    layer: nn.Module, param_name: str, new_tensor: Tensor | None, prefer_copy: bool = False
) -> None:
    """Give a parameter new values, of any shape and dtype; it keeps its ``weight_loader``.

    Args:
        layer: the layer.
        param_name: the name of its parameter.
        new_tensor: the values; its attributes, such as flags for a kernel, are kept. None sets the
            parameter to None.
        prefer_copy: write to the memory of the old parameter if it has the same shape, dtype and
            device, because recorded graphs read that memory.
    """
    old = getattr(layer, param_name, None)
    if new_tensor is None:
        setattr(layer, param_name, None)
        return
    attributes = {k: v for k, v in vars(new_tensor).items() if not k.endswith("weight_loader")}
    if prefer_copy and isinstance(old, nn.Parameter) and _fits(new_tensor, old):
        old.data.copy_(new_tensor.data)
        vars(old).update(attributes)
        return
    new = nn.Parameter(new_tensor.data, requires_grad=False)
    vars(new).update(attributes)
    if (loader := getattr(old, "weight_loader", None)) is not None:
        set_weight_attrs(new, {"weight_loader": loader})
    layer.register_parameter(param_name, new)


def _fits(new: Tensor, old: Tensor) -> bool:
    return (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)

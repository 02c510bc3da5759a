"""Arguments of recorded calls as plain data: enough to build arguments like them elsewhere.

Each argument is a mapping with a ``type``:

- ``scalar``: a number, text or None, as ``value``;
- ``dtype`` and ``device``: the name, as ``value``;
- ``list``: descriptions of the ``items``;
- ``random``: a tensor to be filled with random numbers of the recorded mean, standard deviation
  and range (``mean``, ``std``, ``min``, ``max``);
- ``values``: an integer tensor with its ``values``, such as positions or a block table;
- ``safetensors``: a tensor stored under ``tensor_key`` in a file next to the trace.

Tensors have ``dtype``, ``shape``, ``stride`` and ``device``. Values are stored for the memory from
the first to the last element, so that gaps and overlaps are reproduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opweave.tuning.errors import TraceError

Description = dict[str, Any]
Build = Callable[[Description], Tensor]

_INDEXES = (torch.bool, torch.int16, torch.int32, torch.int64)
_MOST_VALUES = 2**16  # larger integer tensors are packed weights, not indices
_SAMPLE = 2**20
_PLAIN = (int, float, bool, str)
_TENSOR = ("dtype", "shape", "stride", "device")
_FIELDS = {
    "scalar": ("value",), "dtype": ("value",), "device": ("value",), "list": ("items",),
    "random": (*_TENSOR, "min", "max"), "values": (*_TENSOR, "values"),
    "safetensors": (*_TENSOR, "tensor_key"),
}  # fmt: skip


def signature(value: Any) -> Hashable:
    """Return what distinguishes two arguments: layout and dtype of a tensor, other values."""
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape), _stride(value), value.device.type)
    if isinstance(value, (list, tuple)):
        return tuple(map(signature, value))
    return (type(value), repr(value))  # 1, 1.0 and True are equal; NaN is not


def describe(value: Any, keep: Callable[[Tensor], str] | None = None) -> Description:
    """Return the description of an argument.

    Args:
        value: the argument.
        keep: stores a tensor and returns its key; None: store integers only.

    Raises:
        TraceError: the argument is of a kind that cannot be recorded.
    """
    if isinstance(value, Tensor):
        return _tensor(value, keep)
    if isinstance(value, (list, tuple)):
        return {"type": "list", "items": [describe(item, keep) for item in value]}
    if isinstance(value, (torch.dtype, torch.device)):
        kind = "dtype" if isinstance(value, torch.dtype) else "device"
        return {"type": kind, "value": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, _PLAIN):
        return {"type": "scalar", "value": value}
    raise TraceError(f"an argument of type {type(value).__name__} cannot be recorded")


def problem_of(given: Any) -> str:
    """Return what is wrong with a description that was read from a file, or an empty string."""
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        return f"expected an object with a 'type' of {', '.join(_FIELDS)}; found {given!r:.60}"
    missing = [name for name in _FIELDS[kind] if name not in given]
    if missing:
        return f"{kind} lacks {', '.join(missing)}"
    if not all(isinstance(given.get(name, []), list) for name in ("shape", "stride", "items")):
        return "shape, stride and items should be lists"
    return next(filter(None, map(problem_of, given.get("items", ()))), "")


def build(given: Description, load: Build, device: Mapping[str, str]) -> Any:
    """Return an argument like the described one.

    Args:
        given: the description.
        load: returns the stored values of a ``safetensors`` description.
        device: the device type to use instead of a recorded one.
    """
    kind = given["type"]
    if kind == "list":
        return [build(item, load, device) for item in given["items"]]
    if kind == "scalar":
        return given["value"]
    if kind == "device":
        name, _, index = str(given["value"]).partition(":")
        return torch.device(device.get(name, name), *([int(index)] if index else []))
    if kind == "dtype":
        return getattr(torch, given["value"])
    shape, stride = given["shape"], given["stride"]
    count = _span(shape, stride)
    dtype = getattr(torch, given["dtype"])
    if kind == "random":
        flat = _random(given, count, dtype)
    elif kind == "values":
        flat = torch.tensor(given["values"], dtype=dtype)
    else:
        flat = load(given)
    there = flat.to(device.get(given["device"], given["device"]))
    return there.flatten().as_strided(shape, stride)


def _tensor(value: Tensor, keep: Callable[[Tensor], str] | None) -> Description:
    if value.layout is not torch.strided or value.is_quantized:
        raise TraceError(f"a tensor of layout {value.layout} cannot be recorded")
    value = value.detach()
    stride = _stride(value)
    flat = value.as_strided((_span(value.shape, stride),), (1,))
    described = {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "stride": list(stride),
        "device": value.device.type,
    }
    if keep is not None:
        kept = value if value.is_contiguous() else flat
        return {"type": "safetensors", **described, "tensor_key": keep(kept)}
    if value.dtype in _INDEXES and flat.numel() <= _MOST_VALUES:
        return {"type": "values", **described, "values": flat.tolist()}
    return {"type": "random", **described, **_statistics(flat)}


def _stride(value: Tensor) -> tuple[int, ...]:
    """Return the strides; those of dimensions of size 1 as in a contiguous tensor."""
    if value.is_contiguous():
        return torch.empty(value.shape, device="meta").stride()
    return value.stride()


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _statistics(flat: Tensor) -> dict[str, float | int]:
    if not flat.dtype.is_floating_point:
        if not flat.numel():
            return {"min": 0, "max": 0}
        low, high = flat.to(torch.uint8 if flat.dtype is torch.bool else flat.dtype).aminmax()
        return {"min": int(low), "max": int(high)}
    sample = flat[:: max(1, flat.numel() // _SAMPLE)].to(torch.float64)
    sample = sample[sample.isfinite()]  # unused parts of a cache hold anything
    if not sample.numel():
        return {"mean": 0.0, "std": 0.0, "min": 0.0, "max": 0.0}
    std = float(sample.std(correction=0))
    mean, lowest, highest = (float(t) for t in (sample.mean(), *sample.aminmax()))
    return {"mean": mean, "std": std, "min": lowest, "max": highest}


def _random(given: Description, count: int, dtype: torch.dtype) -> Tensor:
    if not dtype.is_floating_point:
        if dtype is torch.bool:
            return torch.randint(given["min"], given["max"] + 1, (count,)).to(dtype)
        return torch.randint(given["min"], given["max"] + 1, (count,), dtype=dtype)
    if math.isclose(given["min"], given["max"]):
        return torch.full((count,), given["mean"]).to(dtype)
    values = torch.randn(count, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    values = values.mul_(given["std"]).add_(given["mean"])
    return values.clamp_(given["min"], given["max"]).to(dtype)

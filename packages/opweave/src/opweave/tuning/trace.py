"""Trace files: the distinct op calls of a model run, one JSON object per line."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opweave import platforms
from opweave.errors import OpweaveError, shown
from opweave.ir import IrOp
from opweave.ir.registry import find_op
from opweave.ir.scope import Scope, current_scope, entered
from opweave.ir.selection import Selection, tokens_of
from opweave.packages import __version__

# Errors of recording, measuring and tuning.


class TuningError(OpweaveError):
    """Base class of the errors of this package."""


class TraceError(TuningError, ValueError):
    """A trace file cannot be read, or an argument cannot be recorded."""


class TuningFileError(TuningError, ValueError):
    """A tuning file cannot be read, or is of another machine."""


class WorkerFailedError(TuningError, RuntimeError):
    """The process that measures does not start."""


# Arguments of recorded calls as plain data: enough to build arguments like them elsewhere.
#
# Each argument is a mapping with a ``type``:
#
# - ``scalar``: a number, text or None, as ``value``;
# - ``dtype`` and ``device``: the name, as ``value``;
# - ``list``: descriptions of the ``items``;
# - ``random``: a tensor to be filled with random numbers of the recorded mean, standard deviation
#   and range (``mean``, ``std``, ``min``, ``max``);
# - ``values``: an integer tensor with its ``values``, such as positions or a block table;
# - ``safetensors``: a tensor stored under ``tensor_key`` in a file next to the trace.
#
# Tensors have ``dtype``, ``shape``, ``stride`` and ``device``. Values are stored for the memory
# from the first to the last element, so that gaps and overlaps are reproduced.


Description = dict[str, Any]
Build = Callable[[Description], Tensor]

_INDEXES = (torch.bool, torch.int16, torch.int32, torch.int64)
_MAX_INDICES = 2**16  # larger integer tensors are packed weights, not indices
_MAX_SAMPLED_ELEMENTS = 2**20  # for the statistics of a tensor
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
    if value is None or isinstance(value, (int, float, bool, str)):
        return {"type": "scalar", "value": value}
    raise TraceError(f"an argument of type {type(value).__name__} cannot be recorded")


def problem_of(data: Any) -> str:
    """Return what is wrong with a description that was read from a file, or an empty string."""
    kind = data.get("type") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        return f"expected an object with a 'type' of {', '.join(_FIELDS)}; found {data!r:.60}"
    missing = [name for name in _FIELDS[kind] if name not in data]
    if missing:
        return f"{kind} lacks {', '.join(missing)}"
    if not all(isinstance(data.get(name, []), list) for name in ("shape", "stride", "items")):
        return "shape, stride and items should be lists"
    return next(filter(None, map(problem_of, data.get("items", ()))), "")


def build(argument: Description, load: Build, device: Mapping[str, str]) -> Any:
    """Return an argument like the described one.

    Args:
        argument: the description.
        load: returns the stored values of a ``safetensors`` description.
        device: the device type to use instead of a recorded one.
    """
    kind = argument["type"]
    if kind == "list":
        return [build(item, load, device) for item in argument["items"]]
    if kind == "scalar":
        return argument["value"]
    if kind == "device":
        name, _, index = str(argument["value"]).partition(":")
        return torch.device(device.get(name, name), *([int(index)] if index else []))
    if kind == "dtype":
        return getattr(torch, argument["value"])
    shape, stride = argument["shape"], argument["stride"]
    dtype = getattr(torch, argument["dtype"])
    if kind == "random":
        flat = _random(argument, _span(shape, stride), dtype)
    elif kind == "values":
        flat = torch.tensor(argument["values"], dtype=dtype)
    else:
        flat = load(argument)
    flat = flat.to(device.get(argument["device"], argument["device"]))
    return flat.flatten().as_strided(shape, stride)


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
        key = keep(value if value.is_contiguous() else flat)
        return {"type": "safetensors", **described, "tensor_key": key}
    if value.dtype in _INDEXES and flat.numel() <= _MAX_INDICES:
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
    sample = flat[:: max(1, flat.numel() // _MAX_SAMPLED_ELEMENTS)].to(torch.float64)
    sample = sample[sample.isfinite()]  # unused parts of a cache are not initialized
    if not sample.numel():
        return {"mean": 0.0, "std": 0.0, "min": 0.0, "max": 0.0}
    std = float(sample.std(correction=0))
    mean, lowest, highest = (float(t) for t in (sample.mean(), *sample.aminmax()))
    return {"mean": mean, "std": std, "min": lowest, "max": highest}


def _random(tensor: Description, count: int, dtype: torch.dtype) -> Tensor:
    low, high = tensor["min"], tensor["max"]
    if not dtype.is_floating_point:
        drawn_dtype = torch.int64 if dtype is torch.bool else dtype
        return torch.randint(low, high + 1, (count,), dtype=drawn_dtype).to(dtype)
    if math.isclose(low, high):
        return torch.full((count,), tensor["mean"]).to(dtype)
    values = torch.randn(count, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    return values.mul_(tensor["std"]).add_(tensor["mean"]).clamp_(low, high).to(dtype)


# Trace files: the distinct op calls of a model run, one JSON object per line.
#
# The first line is a header with the version of the format, the versions of opweave and torch,
# and the device. Each other line is a distinct call: the op, the provider that ran, the number
# of calls, the number of tokens, and the arguments by name, as described
# above.


FORMAT, VERSION = "opweave trace", 1
Values = tuple[Any, ...]


@dataclass(frozen=True)
class TracedCall:
    """A distinct call.

    Attributes:
        op: the name of the op.
        provider: the provider that ran.
        count: the number of calls.
        tokens: the first dimension of the op's first tensor argument.
        arguments: the description of each argument, by parameter name.
    """

    op: str
    provider: str
    count: int
    tokens: int
    arguments: dict[str, Description]

    @property
    def label(self) -> str:
        """The dtypes and shapes of the tensor arguments in short form."""
        return ", ".join(filter(None, (_label(n, a) for n, a in self.arguments.items())))


@dataclass
class Trace:
    """The calls of a trace.

    Attributes:
        calls: the distinct calls in the order of their first occurrence.
        device: the device type of the machine that recorded the trace.
        device_name: the name of that device.
        versions: the versions of opweave and torch.
        skipped: why calls of an op could not be recorded, by op.
        data: the tensors that were stored, by key.
    """

    calls: list[TracedCall] = field(default_factory=list)
    device: str = "cpu"
    device_name: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    data: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Trace:
        """Return an empty trace of this machine."""
        return cls(
            device=platforms.current_platform.device_type,
            device_name=platforms.current_platform.get_device_name(),
            versions={"opweave": __version__, "torch": torch.__version__},
        )

    def save(self, path: Path) -> None:
        """Write the trace, and the stored tensors to a safetensors file next to it."""
        header: dict[str, Any] = {
            "format": FORMAT, "version": VERSION, **self.versions, "device": self.device,
            "device_name": self.device_name, "skipped": self.skipped,
            "data": data_file(path).name if self.data else None,
        }  # fmt: skip
        if self.data:
            from safetensors.torch import save_file

            save_file({key: t.contiguous() for key, t in self.data.items()}, data_file(path))
        lines = [json.dumps(header), *(json.dumps(asdict(call)) for call in self.calls)]
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a trace file, and the tensors stored next to it.

        Raises:
            TraceError: the file is missing, is not a trace, or has an unknown version.
        """
        try:
            header, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}: cannot read the trace: {error}.") from error
        head = _parsed(path, 1, header)
        if head.get("format") != FORMAT or head.get("version") != VERSION:
            raise TraceError(
                f"{path}: the first line should be the header of a trace of version {VERSION}, "
                f"found {shown(header)}. Record one with opweave record."
            )
        skipped = head.get("skipped") or {}
        if not isinstance(skipped, dict):
            raise TraceError(f"{path}: 'skipped' should be an object, found {skipped!r:.60}.")
        numbered = enumerate(lines, 2)
        calls = [_call(path, number, line) for number, line in numbered if line.strip()]
        return cls(
            calls,
            str(head.get("device", "cpu")),
            str(head.get("device_name", "")),
            {name: str(head[name]) for name in ("opweave", "torch") if name in head},
            skipped,
            _data(path, head.get("data")),
        )

    def op(self, call: TracedCall) -> IrOp:
        """Return the op of *call*.

        Raises:
            UnknownOpError: it is not declared.
            TraceError: its parameters are others than the recorded ones.
        """
        op = find_op(call.op)
        if tuple(call.arguments) != op.schema.names:
            raise TraceError(
                f"{call.op}: the trace has the parameters {', '.join(call.arguments)}, the op has "
                f"{', '.join(op.schema.names)}. Record the trace again with this version."
            )
        return op

    def values(self, call: TracedCall, seed: int = 0) -> Values:
        """Return arguments like those of *call*, on the current device; random ones from *seed*.

        Raises:
            TraceError: a description is malformed.
        """
        device = {self.device: platforms.current_platform.device_type}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                return tuple(build(a, self._stored, device) for a in call.arguments.values())
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise TraceError(
                    f"{call.op}: cannot build the recorded arguments: "
                    f"{type(error).__name__}: {error}."
                ) from error

    def _stored(self, tensor: Description) -> Tensor:
        return self.data[tensor["tensor_key"]]


def data_file(path: Path) -> Path:
    """Return the file for the tensors of a trace."""
    return path.with_suffix(".safetensors")


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise TraceError(f"{path}: line {number} is not a JSON object: {shown(line)}.")
    return data


def _call(path: Path, number: int, line: str) -> TracedCall:
    data = _parsed(path, number, line)
    kinds = {"op": str, "provider": str, "count": int, "tokens": int, "arguments": dict}
    for name, kind in kinds.items():
        if not isinstance(data.get(name), kind):
            raise TraceError(
                f"{path}: line {number}: {name!r} should be {kind.__name__}, "
                f"found {data.get(name)!r:.60}."
            )
    for name, argument in data["arguments"].items():
        if problem := problem_of(argument):
            raise TraceError(f"{path}: line {number}: argument {name!r}: {problem}.")
    return TracedCall(**{name: data[name] for name in kinds})


def _data(path: Path, name: object) -> dict[str, Tensor]:
    if name is None:
        return {}
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = path.with_name(Path(str(name)).name)
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{path}: cannot read its tensors from {file}: {error}.") from error


def _label(name: str, argument: Mapping[str, Any]) -> str:
    if "shape" not in argument:
        return ""
    return f"{name} {argument['dtype']}{argument['shape']}".replace(" [", "[")


# Record the op calls of a model run into a trace.


class Recorder:
    """Collects distinct calls.

    Args:
        data: also store the tensors of the first call of each kind.
    """

    def __init__(self, *, data: bool = False) -> None:
        self._data = data
        self._calls: dict[Hashable, TracedCall] = {}
        self._counts: Counter[Hashable] = Counter()
        self._trace = Trace.here()

    @property
    def trace(self) -> Trace:
        """The calls recorded so far."""
        calls = [replace(call, count=self._counts[key]) for key, call in self._calls.items()]
        return replace(self._trace, calls=calls)

    def add(self, selection: Selection, values: tuple[Any, ...]) -> None:
        """Count one call."""
        op = selection.op
        if op.name in self._trace.skipped:
            return
        key = (op.name, selection.provider, signature(values))
        self._counts[key] += 1
        if key not in self._calls:
            try:
                self._calls[key] = self._described(selection, values, len(self._calls))
            except TraceError as error:
                self._trace.skipped[op.name] = str(error)

    def _described(self, selection: Selection, values: tuple[Any, ...], number: int) -> TracedCall:
        arguments = {
            name: describe(value, self._keeper(f"{number}.{name}") if self._data else None)
            for name, value in zip(selection.op.schema.names, values, strict=True)
        }
        tokens = int(tokens_of(selection.op, values) or 0) if selection.op.schema.tensors else 0
        return TracedCall(selection.op.name, selection.provider, 0, tokens, arguments)

    def _keeper(self, prefix: str) -> Callable[[Tensor], str]:
        def keep(tensor: Tensor) -> str:
            key = prefix
            while key in self._trace.data:  # a tensor of the same list has this key
                key += "_"
            self._trace.data[key] = tensor.detach().cpu().clone()
            return key

        return keep


@contextmanager
def record_calls(*, data: bool = False) -> Iterator[Recorder]:
    """Record the op calls inside the block, in this thread or asyncio task.

    Calls inside a compiled graph are not recorded: run the model in eager mode.

    Args:
        data: also store the tensors of the first call of each kind.
    """
    recorder = Recorder(data=data)
    with entered(Scope(current_scope(), recorder=recorder.add)):
        yield recorder

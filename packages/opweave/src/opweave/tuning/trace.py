"""Trace files: the distinct op calls of a model run, one JSON object per line.

The first line is a header with the version of the format, the versions of opweave and torch, and
the device. Each other line is a distinct call: the op, the provider that ran, the number of calls,
the number of tokens, and the arguments by name (see :mod:`opweave.tuning.arguments`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opweave.base.version import __version__
from opweave.ir import IrOp
from opweave.ir.registry import find_op
from opweave.platforms import current_platform
from opweave.tuning.arguments import Description, build, problem_of
from opweave.tuning.errors import TraceError

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
            device=current_platform.device_type,
            device_name=current_platform.get_device_name(),
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
                f"found {header[:60]!r}. Record one with opweave record."
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
        device = {self.device: current_platform.device_type}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                return tuple(build(a, self._stored, device) for a in call.arguments.values())
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise TraceError(
                    f"{call.op}: cannot build the recorded arguments: "
                    f"{type(error).__name__}: {error}."
                ) from error

    def _stored(self, given: Description) -> Tensor:
        return self.data[given["tensor_key"]]


def data_file(path: Path) -> Path:
    """Return the file for the tensors of a trace."""
    return path.with_suffix(".safetensors")


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise TraceError(f"{path}: line {number} is not a JSON object: {line[:60]!r}.")
    return found


def _call(path: Path, number: int, line: str) -> TracedCall:
    found = _parsed(path, number, line)
    wanted = {"op": str, "provider": str, "count": int, "tokens": int, "arguments": dict}
    for name, kind in wanted.items():
        if not isinstance(found.get(name), kind):
            raise TraceError(
                f"{path}: line {number}: {name!r} should be {kind.__name__}, "
                f"found {found.get(name)!r:.60}."
            )
    for name, argument in found["arguments"].items():
        if problem := problem_of(argument):
            raise TraceError(f"{path}: line {number}: argument {name!r}: {problem}.")
    return TracedCall(**{name: found[name] for name in wanted})


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


def _label(name: str, given: Mapping[str, Any]) -> str:
    if "shape" not in given:
        return ""
    return f"{name} {given['dtype']}{given['shape']}".replace(" [", "[")

"""A case: arguments for an op, the native result, and a reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from opweave import ir
from opweave.conformance.memory import Values, copied
from opweave.ir import IrOp
from opweave.ir.selection import tensors_in

Outputs = tuple[Tensor, ...]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Case:
    """Arguments for *op*; *label* describes how they were generated."""

    def __init__(self, op: IrOp, label: str, values: Sequence[Any]) -> None:
        self.op, self.label, self.values = op, label, tuple(values)

    def __str__(self) -> str:
        arguments = ", ".join(map(_shown, self.values))
        return f"{self.op.name}({arguments}) [{self.label}]"

    def with_values(self, label: str, values: Sequence[Any]) -> Case:
        """Return a case of the same op with other arguments."""
        return Case(self.op, f"{self.label}, {label}" if self.label else label, values)

    @cached_property
    def _run(self) -> Outputs | Exception:
        return run_natively(self.op, self.values)

    @property
    def refusal(self) -> Exception | None:
        """The exception of the native implementation, if it rejects the arguments."""
        return self._run if isinstance(self._run, Exception) else None

    @property
    def native(self) -> Outputs:
        """The result of the native implementation."""
        if isinstance(self._run, Exception):
            raise self._run
        return self._run

    @cached_property
    def reference(self) -> Outputs:
        """The native result in float64, or the plain native result if float64 fails."""
        wide = _changed(self.values, _widened)
        # An argument that is a dtype is that of the result.
        wide = tuple(
            torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
            for value in wide
        )
        outcome = _run_here(self.op, wide)
        if isinstance(outcome, Exception) or [t.shape for t in outcome] != [
            t.shape for t in self.native
        ]:
            return self.native
        return outcome


def outputs_of(result: Any) -> Outputs:
    """Return the outputs of an op as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def run_natively(op: IrOp, values: Values) -> Outputs | Exception:
    """Return the native result for copies of the arguments, or the exception.

    The CPU runs first: an out-of-range index raises there, but makes CUDA unusable for the whole
    process.
    """
    if any(t.is_cuda for t in tensors_in(values)):
        outcome = _run_here(op, _changed(values, Tensor.cpu))
        if isinstance(outcome, Exception) and not isinstance(outcome, NotImplementedError):
            return outcome
    return _run_here(op, values)


def _run_here(op: IrOp, values: Values) -> Outputs | Exception:
    args, kwargs = op.schema.split(copied(values))
    try:
        with torch.no_grad(), natively(op):
            return outputs_of(op.native(*args, **kwargs))
    except Exception as error:
        return error


@contextmanager
def natively(op: IrOp) -> Iterator[None]:
    """Select native for every op, including the ops that a composite calls."""
    with ir.priority(dict.fromkeys(_ops_here(op), "native")):
        yield


def _ops_here(op: IrOp) -> list[str]:
    registry = ir.current_registry()
    return list(registry.ops) if op.registry is registry else []


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return *value* with every tensor in it changed."""
    if isinstance(value, (list, tuple)):
        return type(value)(_changed(item, change) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def _widened(t: Tensor) -> Tensor:
    return t.to(torch.float64) if t.dtype in _NARROW else t


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        strides = "" if value.is_contiguous() else f" strides {tuple(value.stride())}"
        return f"{dtype}{list(value.shape)}{strides}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)

"""The subject of verification: an implementation of an op on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opweave.conformance.compat import fake_values
from opweave.conformance.memory import Values
from opweave.ir import IrOp, IrOpImpl
from opweave.ir.priority import NATIVE


@dataclass(frozen=True)
class Subject:
    """An implementation of an op, on a device.

    Attributes:
        op: the op.
        provider: the provider of the implementation.
        device: the device type of its arguments.
        options: options of the op's input generator that differ from its defaults.
    """

    op: IrOp
    provider: str
    device: str = "cpu"
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.op.name}:{self.provider}"

    @property
    def impl(self) -> IrOpImpl:
        """The implementation."""
        return self.op.impls[self.provider]

    @property
    def is_native(self) -> bool:
        """Whether it is the native implementation."""
        return self.provider == NATIVE

    def has(self, trait: str) -> bool:
        """Whether the implementation claims *trait*."""
        return trait in self.impl.traits

    def accepts(self, values: Values) -> bool:
        """Whether the predicate accepts the arguments (PredicateFailedError if it raises)."""
        return self.impl.rejection(values) is None

    def compiles(self, values: Values) -> bool:
        """Whether the predicate accepts the arguments in a graph, without tensor values."""
        return self.accepts(fake_values(values))

    @property
    def call(self) -> Callable[..., Any]:
        """The op, restricted to this implementation."""
        return self.op.using(f"{self.provider}!")

    def run(self, values: Values) -> Any:
        """Run the op functionally."""
        args, kwargs = self.op.schema.split(values)
        with torch.no_grad():
            return self.call(*args, **kwargs)

    def run_donating(self, values: Values) -> Any:
        """Run the op with donated activations."""
        args, kwargs = self.op.schema.split(values)
        with torch.no_grad():
            return self.op.using(f"{self.provider}!").maybe_inplace(*args, **kwargs)

"""The typed configuration of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from opweave.ir import IrOpPriorityConfig


@dataclass(frozen=True)
class KernelConfig:
    """Which kernels to use.

    Attributes:
        ir_op_priority: priority lists by op, as a dict or an
            :class:`opweave.ir.IrOpPriorityConfig`.
    """

    ir_op_priority: Mapping[str, str | Iterable[str]] = field(default_factory=IrOpPriorityConfig)

    def __post_init__(self) -> None:
        typed = IrOpPriorityConfig(self.ir_op_priority)
        object.__setattr__(self, "ir_op_priority", typed)


@dataclass(frozen=True)
class EngineConfig:
    """How to run a model.

    Attributes:
        dtype: ``"auto"`` (the checkpoint's), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        seed: seeds sampling for requests that bring no seed of their own.
        kernel_config: which kernels to use.
    """

    dtype: str = "auto"
    seed: int = 0
    kernel_config: KernelConfig = field(default_factory=KernelConfig)

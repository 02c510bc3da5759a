"""The typed configuration of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from opweave.config.compilation import CompilationConfig
from opweave.config.current import current_compilation_config
from opweave.ir import IrOpPriorityConfig
from opweave.ir.errors import SettingError


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
        compilation_config: how to compile; a :class:`CompilationConfig`, or a dict of what differs
            from the current one, which is also the default.

    Raises:
        SettingError: (a ValueError) *compilation_config* is malformed.
    """

    dtype: str = "auto"
    seed: int = 0
    kernel_config: KernelConfig = field(default_factory=KernelConfig)
    compilation_config: CompilationConfig | Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = self.compilation_config
        if isinstance(given, CompilationConfig):
            return
        if not isinstance(given, Mapping):
            raise SettingError(
                f"compilation_config={given!r} should be a CompilationConfig or a dict."
            )
        typed = current_compilation_config().updated(given, "compilation_config")
        object.__setattr__(self, "compilation_config", typed)

    @property
    def compilation(self) -> CompilationConfig:
        """``compilation_config``, which is typed however it was given."""
        assert isinstance(self.compilation_config, CompilationConfig)
        return self.compilation_config

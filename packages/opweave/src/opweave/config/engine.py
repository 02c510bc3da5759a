"""The typed configuration of an engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from opweave.config.cache import CacheConfig
from opweave.config.checks import check_choice, check_count
from opweave.config.compilation import CompilationConfig
from opweave.config.current import current_compilation_config
from opweave.config.origin import Config
from opweave.config.parallel import ParallelConfig
from opweave.config.scheduler import SchedulerConfig
from opweave.ir import IrOpPriorityConfig
from opweave.ir.errors import SettingError


@dataclass(frozen=True)
class KernelConfig(Config):
    """Which kernels to use.

    Attributes:
        ir_op_priority: priority lists by op, as a dict or an
            :class:`opweave.ir.IrOpPriorityConfig`.
    """

    ir_op_priority: Mapping[str, str | Iterable[str]] = field(default_factory=IrOpPriorityConfig)

    def __post_init__(self) -> None:
        typed = IrOpPriorityConfig(self.ir_op_priority)
        object.__setattr__(self, "ir_op_priority", typed)


LoadFormat = Literal["auto", "dummy"]
ModelImpl = Literal["auto", "opweave", "transformers"]
# OpenMP crashes instead of rejecting a larger number.
_MAX_THREADS = max(1024, os.cpu_count() or 1)
_PARTS = {"cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig}


@dataclass(frozen=True)
class EngineConfig(Config):
    """How to run a model.

    Attributes:
        dtype: ``"auto"`` (the checkpoint's), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        seed: the seed of requests that do not have their own.
        load_format: ``"auto"`` reads the checkpoint's weights; ``"dummy"`` generates random
            ones from ``config.json``.
        model_impl: the implementation of the model: ``"opweave"``, ``"transformers"``, or
            ``"auto"``: opweave's if it supports the architecture, else transformers'.
        generation_config: the source of sampling defaults: ``"auto"`` (the checkpoint's
            ``generation_config.json``), ``"none"``, or a directory with another such file.
        cpu_threads: CPU threads per rank; None: OMP_NUM_THREADS, else torch's default divided by
            the number of ranks on the machine.
        kernel_config: which kernels to use.
        compilation_config: a :class:`CompilationConfig`, or a dict of changes to the current one,
            which is the default.
        cache: the KV cache.
        scheduler: batch sizes and the order of requests.
        parallel: the number of ranks and replicas.

    Raises:
        SettingError: (a ValueError) *compilation_config* is malformed, or a value has the wrong
            type or is out of range.
    """

    dtype: str = "auto"
    seed: int = 0
    load_format: LoadFormat = "auto"
    model_impl: ModelImpl = "auto"
    generation_config: str = "auto"
    cpu_threads: int | None = None
    kernel_config: KernelConfig = field(default_factory=KernelConfig)
    compilation_config: CompilationConfig | Mapping[str, object] = field(default_factory=dict)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        check_choice(type(self).__name__, "load_format", self.load_format, get_args(LoadFormat))
        check_choice(type(self).__name__, "model_impl", self.model_impl, get_args(ModelImpl))
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise SettingError(
                f"generation_config={self.generation_config!r} must be 'auto', 'none' or the name "
                "of a directory with a generation_config.json."
            )
        if self.cpu_threads is not None:
            check_count(type(self).__name__, "cpu_threads", self.cpu_threads)
            if self.cpu_threads > _MAX_THREADS:
                raise SettingError(
                    f"cpu_threads={self.cpu_threads} is more than {_MAX_THREADS}; the machine has "
                    f"{os.cpu_count()} processors."
                )
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise SettingError(f"{name}={getattr(self, name)!r} should be a {kind.__name__}.")
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
        """``compilation_config`` as a :class:`CompilationConfig`."""
        assert isinstance(self.compilation_config, CompilationConfig)
        return self.compilation_config

"""One typed config tree, and its sources: command line, environment, file."""

from opweave.config.compilation import (
    CompilationConfig,
    CompilationMode,
    compilation_config,
    current_compilation_config,
)
from opweave.config.engine import (
    CacheConfig,
    EngineConfig,
    KernelConfig,
    ParallelConfig,
    SchedulerConfig,
)

__all__ = [
    "CacheConfig", "CompilationConfig", "CompilationMode", "EngineConfig", "KernelConfig",
    "ParallelConfig", "SchedulerConfig", "compilation_config", "current_compilation_config",
]  # fmt: skip

"""One typed config tree, and its sources: command line, environment, file."""

from opweave.config.cache import CacheConfig
from opweave.config.compilation import CompilationConfig, CompilationMode
from opweave.config.current import compilation_config, current_compilation_config
from opweave.config.engine import EngineConfig, KernelConfig
from opweave.config.parallel import ParallelConfig
from opweave.config.scheduler import SchedulerConfig

__all__ = [
    "CacheConfig",
    "CompilationConfig",
    "CompilationMode",
    "EngineConfig",
    "KernelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "compilation_config",
    "current_compilation_config",
]

"""One typed config tree, and its sources: command line, environment, file."""

from opweave.config.compilation import CompilationConfig, CompilationMode
from opweave.config.current import compilation_config, current_compilation_config
from opweave.config.engine import EngineConfig, KernelConfig

__all__ = [
    "CompilationConfig",
    "CompilationMode",
    "EngineConfig",
    "KernelConfig",
    "compilation_config",
    "current_compilation_config",
]

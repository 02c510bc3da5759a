"""One typed config tree, and its sources: command line, environment, file."""

from opweave.config.engine import EngineConfig, KernelConfig

__all__ = ["EngineConfig", "KernelConfig"]

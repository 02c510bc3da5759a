"""The configuration by vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opweave.config import (
    CompilationConfig,
    CompilationMode,
    EngineConfig,
    KernelConfig,
    compilation_config,
    current_compilation_config,
)
from opweave.ir import IrOpPriorityConfig

__all__ = [
    "CompilationConfig",
    "CompilationMode",
    "IrOpPriorityConfig",
    "KernelConfig",
    "VllmConfig",
    "get_current_vllm_config",
    "set_current_vllm_config",
]

VllmConfig = EngineConfig


@contextmanager
def set_current_vllm_config(vllm_config: EngineConfig) -> Iterator[None]:
    """Build layers inside the block by the ``compilation_config`` of this configuration."""
    with compilation_config(vllm_config.compilation):
        yield


def get_current_vllm_config() -> EngineConfig:
    """Return a configuration with the ``compilation_config`` that holds here."""
    return EngineConfig(compilation_config=current_compilation_config())

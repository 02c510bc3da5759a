"""vLLM's names for the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opweave.config import (
    CacheConfig,
    CompilationConfig,
    CompilationMode,
    EngineConfig,
    KernelConfig,
    compilation_config,
    current_compilation_config,
)
from opweave.ir import IrOpPriorityConfig, priority

__all__ = [
    "CacheConfig",
    "CompilationConfig",
    "CompilationMode",
    "IrOpPriorityConfig",
    "KernelConfig",
    "VllmConfig",
    "get_cached_compilation_config",
    "get_current_vllm_config",
    "set_current_vllm_config",
]

VllmConfig = EngineConfig
get_cached_compilation_config = current_compilation_config


_given: ContextVar[EngineConfig | None] = ContextVar("opweave_vllm_api_config", default=None)


@contextmanager
def set_current_vllm_config(vllm_config: EngineConfig) -> Iterator[None]:
    """Use this configuration inside the block, in this thread or asyncio task only.

    ``compilation_config`` applies to layers that are created, ``kernel_config`` to ops.

    Raises:
        UnknownOpError, UnknownProviderError: an op or provider in it is not registered.
    """
    priorities = vllm_config.kernel_config.ir_op_priority
    with compilation_config(vllm_config.compilation), priority(priorities):
        token = _given.set(vllm_config)
        try:
            yield
        finally:
            _given.reset(token)


def get_current_vllm_config() -> EngineConfig:
    """Return the configuration of the innermost block, or else one from the current settings."""
    given, compilation = _given.get(), current_compilation_config()
    if given is not None and given.compilation is compilation:
        return given
    return EngineConfig(compilation_config=compilation)  # no block, or opweave's own is innermost

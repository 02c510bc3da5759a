"""The configuration by vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opweave.config import (
    CompilationConfig,
    CompilationMode,
    EngineConfig,
    KernelConfig,
    compilation_config,
    current_compilation_config,
)
from opweave.ir import IrOpPriorityConfig, priority

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


_given: ContextVar[EngineConfig | None] = ContextVar("opweave_vllm_api_config", default=None)


@contextmanager
def set_current_vllm_config(vllm_config: EngineConfig) -> Iterator[None]:
    """Go by this configuration inside the block, in this thread or asyncio task only.

    Its ``compilation_config`` holds for layers that are built, its ``kernel_config`` for ops.

    Raises:
        UnknownOpError, UnknownProviderError: it prefers what is not registered.
    """
    priorities = vllm_config.kernel_config.ir_op_priority
    with compilation_config(vllm_config.compilation), priority(priorities):
        token = _given.set(vllm_config)
        try:
            yield
        finally:
            _given.reset(token)


def get_current_vllm_config() -> EngineConfig:
    """Return the configuration of the innermost block; outside of any, one that has what holds."""
    given, compilation = _given.get(), current_compilation_config()
    if given is not None and given.compilation is compilation:
        return given
    return EngineConfig(compilation_config=compilation)  # opweave's own block is the innermost

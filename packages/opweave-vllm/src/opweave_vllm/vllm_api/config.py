"""vLLM's names for the configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from opweave import config
from opweave.config import (
    CacheConfig,
    CompilationMode,
    EngineConfig,
    KernelConfig,
    compilation_config,
    current_compilation_config,
)
from opweave.config.values import read_object
from opweave.ir import IrOpPriorityConfig, priority
from opweave.ir.errors import SettingError
from opweave.registration import bound

__all__ = [
    "CacheConfig", "CompilationConfig", "CompilationMode", "IrOpPriorityConfig", "KernelConfig",
    "PassConfig", "VllmConfig", "get_cached_compilation_config", "get_current_vllm_config",
    "get_current_vllm_config_or_none", "set_current_vllm_config",
]  # fmt: skip

VllmConfig = EngineConfig


@dataclass(frozen=True)
class PassConfig:
    """Which compiler passes run.

    opweave fuses ops where it has a kernel for the fusion, with one switch for all: the ``fuse_``
    fields that are given must be equal.

    Raises:
        SettingError: some fusions are on and others off.
    """

    eliminate_noops: bool = True
    fuse_norm_quant: bool | None = None
    fuse_act_quant: bool | None = None
    fuse_attn_quant: bool | None = None
    fuse_allreduce_rms: bool | None = None

    def __post_init__(self) -> None:
        fusions = self._fusions()
        if len(set(fusions.values())) > 1:
            raise SettingError(
                f"PassConfig: {fusions} turns some fusions on and others off, but opweave has one "
                "switch for all. Give them the same value, and prefer 'native' for the ops that "
                "must not be fused."
            )

    def options(self) -> dict[str, bool]:
        """Return the options of opweave's compiler that differ from their defaults."""
        options = {
            "noop_elimination": self.eliminate_noops,
            "fusion": all(self._fusions().values()),
        }
        return {name: value for name, value in options.items() if not value}

    def _fusions(self) -> dict[str, bool]:
        switches = {n: value for n, value in vars(self).items() if n.startswith("fuse_")}
        return {name: value for name, value in switches.items() if value is not None}


@dataclass(frozen=True)
class CompilationConfig(config.CompilationConfig):
    """opweave's configuration with vLLM's *pass_config*, which becomes backend options."""

    pass_config: PassConfig = field(default_factory=PassConfig)

    def __post_init__(self) -> None:
        options = {**self.pass_config.options(), **read_object("options", self.options)}
        object.__setattr__(self, "options", options)
        super().__post_init__()


class _CurrentCompilation:
    """``get_cached_compilation_config``: opweave's current configuration, which is never stale."""

    def __call__(self) -> config.CompilationConfig:
        return current_compilation_config()

    def cache_clear(self) -> None:
        """No-op: nothing is cached."""


get_cached_compilation_config = _CurrentCompilation()

_current: ContextVar[EngineConfig | None] = ContextVar("opweave_vllm_api_config", default=None)


@contextmanager
def set_current_vllm_config(vllm_config: EngineConfig) -> Iterator[None]:
    """Use this configuration inside the block, in this thread or asyncio task only.

    ``compilation_config`` applies to layers that are created, ``kernel_config`` to ops.

    Raises:
        UnknownOpError, UnknownProviderError: an op or provider in it is not registered.
    """
    priorities = vllm_config.kernel_config.ir_op_priority
    compilation = compilation_config(vllm_config.compilation)
    with compilation, priority(priorities), bound(_current, vllm_config):
        yield


def get_current_vllm_config() -> EngineConfig:
    """Return the configuration of the innermost block, or else one from the current settings."""
    vllm_config, compilation = _current.get(), current_compilation_config()
    if vllm_config is not None and vllm_config.compilation is compilation:
        return vllm_config
    return EngineConfig(compilation_config=compilation)  # no block, or opweave's own is innermost


def get_current_vllm_config_or_none() -> EngineConfig | None:
    """Return the configuration of the innermost block, or None outside a block."""
    return None if _current.get() is None else get_current_vllm_config()

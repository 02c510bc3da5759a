"""The typed configuration of an engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from opweave.config.compilation import CompilationConfig, current_compilation_config
from opweave.config.values import COUNT, FLAG, SECONDS, SHARE, Config, checked, one_of
from opweave.ir import IrOpPriorityConfig
from opweave.ir.errors import SettingError

# The configuration of the KV cache.


@dataclass(frozen=True)
class CacheConfig(Config):
    """The paged KV cache, and the states of recurrent layers.

    Attributes:
        block_size: tokens per block; most kernels need a multiple of 16.
        num_blocks: blocks of a layer with full attention; None: as many as fit into memory.
        memory_bytes: memory for all layers together. None: on a device, the rest of
            *memory_utilization*; in host memory, a quarter of the free memory, at most 4 GiB.
            Never more than *max_num_seqs* sequences of the maximum length can use.
        memory_utilization: the fraction of device memory for model and cache.
        enable_prefix_caching: keep the blocks of finished sequences while there is room, and reuse
            them for sequences with the same prefix.

    Raises:
        SettingError: (a ValueError) a value is out of range, or *num_blocks* and *memory_bytes* are
            both given.
    """

    block_size: int = checked(COUNT, 64)
    num_blocks: int | None = checked(COUNT, None)
    memory_bytes: int | None = checked(COUNT, None)
    memory_utilization: float = checked(SHARE, 0.9)
    enable_prefix_caching: bool = checked(FLAG, True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_blocks is not None and self.memory_bytes is not None:
            raise SettingError(
                f"CacheConfig: num_blocks={self.num_blocks} and memory_bytes={self.memory_bytes} "
                "are mutually exclusive; give one of them."
            )


# The configuration of the scheduler.


POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class SchedulerConfig(Config):
    """Batch sizes and the order of requests.

    Attributes:
        max_num_seqs: the maximum number of sequences per step.
        max_num_batched_tokens: the maximum number of tokens per step, decode and prefill together.
        max_model_len: the maximum number of tokens of a prompt and its answer; None: the model's
            context, or less if the cache holds less.
        policy: ``"fcfs"`` (first come, first served), or ``"priority"``: the lowest number runs
            first, ties in order of arrival. A request preempts those with higher numbers if memory
            is short; they are recomputed later.
        enable_chunked_prefill: split long prompts over several steps, together with decodes.
            Without it, *max_num_batched_tokens* must be at least *max_model_len*.
        async_scheduling: launch the next step while the device runs one, if its tokens can be
            sampled without the host: greedy ones without penalties, grammars or log-probabilities.
            The tokens are the same. None: on devices that run asynchronously. It needs one rank.

    Raises:
        SettingError: (a ValueError) a value is out of range or conflicts with another.
    """

    max_num_seqs: int = checked(COUNT, 64)
    max_num_batched_tokens: int = checked(COUNT, 2048)
    max_model_len: int | None = checked(COUNT, None)
    policy: str = checked(one_of(*POLICIES), "fcfs")
    enable_chunked_prefill: bool = checked(FLAG, True)
    async_scheduling: bool | None = checked(FLAG, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingError(
                f"SchedulerConfig: max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}, so not every sequence can get a token. Raise "
                "the former or lower the latter."
            )


# The configuration of tensor and data parallelism.


@dataclass(frozen=True)
class ParallelConfig(Config):
    """Tensor-parallel ranks and data-parallel replicas.

    Attributes:
        tensor_parallel_size: ranks that each hold a part of every layer.
        data_parallel_size: replicas of the model, each with *tensor_parallel_size* ranks; several
            replicas run as Ray actors.
        data_parallel_address: ``"host:port"`` of a Ray cluster, or ``"auto"`` for the one of this
            machine; None: RAY_ADDRESS, else the engine starts Ray and stops it on shutdown.
        timeout: seconds without a response after which a rank or replica counts as failed. It
            includes the time by which one rank compiles longer than another.

    Raises:
        SettingError: (a ValueError) a value is out of range, or *data_parallel_address* is given
            without several replicas.
    """

    tensor_parallel_size: int = checked(COUNT, 1)
    timeout: float = checked(SECONDS, 60.0)
    data_parallel_size: int = checked(COUNT, 1)
    data_parallel_address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        address = self.data_parallel_address
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        is_valid = address in (None, "auto") or (host and "/" not in host and port.isdecimal())
        if not is_valid:
            raise SettingError(
                f"ParallelConfig: data_parallel_address={address!r} must be host:port of a Ray "
                "cluster, auto, or None. ray:// addresses are not supported; run the program on a "
                "machine of the cluster."
            )
        if address is not None and self.data_parallel_size == 1:
            raise SettingError(
                f"ParallelConfig: data_parallel_address={address!r} needs several replicas, but "
                "data_parallel_size is 1. Raise data_parallel_size, or remove the address."
            )


# The configuration of kernels and of the whole engine.


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
        super().__post_init__()  # records the typed value


LoadFormat = Literal["auto", "dummy"]
ModelImpl = Literal["auto", "opweave", "transformers"]
_LOAD_FORMAT, _MODEL_IMPL = one_of(*get_args(LoadFormat)), one_of(*get_args(ModelImpl))
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
    load_format: LoadFormat = checked(_LOAD_FORMAT, "auto")  # noqa: RUF009 (a field)
    model_impl: ModelImpl = checked(_MODEL_IMPL, "auto")  # noqa: RUF009 (a field)
    generation_config: str = "auto"
    cpu_threads: int | None = checked(COUNT, None)
    kernel_config: KernelConfig = field(default_factory=KernelConfig)
    compilation_config: CompilationConfig | Mapping[str, object] = field(default_factory=dict)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise SettingError(
                f"generation_config={self.generation_config!r} must be 'auto', 'none' or the name "
                "of a directory with a generation_config.json."
            )
        if self.cpu_threads is not None and self.cpu_threads > _MAX_THREADS:
            raise SettingError(
                f"cpu_threads={self.cpu_threads} is more than {_MAX_THREADS}; the machine has "
                f"{os.cpu_count()} processors."
            )
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise SettingError(f"{name}={getattr(self, name)!r} should be a {kind.__name__}.")
        changes = self.compilation_config
        if isinstance(changes, CompilationConfig):
            return
        if not isinstance(changes, Mapping):
            raise SettingError(
                f"compilation_config={changes!r} should be a CompilationConfig or a dict."
            )
        typed = current_compilation_config().updated(changes, "compilation_config")
        object.__setattr__(self, "compilation_config", typed)

    @property
    def compilation(self) -> CompilationConfig:
        """``compilation_config`` as a :class:`CompilationConfig`."""
        return cast("CompilationConfig", self.compilation_config)

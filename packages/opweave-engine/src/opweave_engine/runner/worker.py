"""Worker: owns a device, its memory, and the model on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opweave.config import CacheConfig, EngineConfig, compilation_config
from opweave.layers.unused import warn_of_unused_ops, warn_of_unused_replacements
from opweave.platforms import Platform
from opweave.platforms.errors import UnsupportedByPlatformError
from opweave.plugins import resolve_obj_by_qualname
from opweave_engine.attention.layers import LayerGroup
from opweave_engine.cache.plan import CachePlan
from opweave_engine.loading.checkpoint import Progress
from opweave_engine.loading.loader import as_language_model, load_model
from opweave_engine.runner.model_runner import ModelRunner
from opweave_engine.runner.step import SequenceStep
from opweave_engine.sampling.sampling_request import Sampled

_HOST_MEMORY = 4 << 30  # largest default cache size in the host's memory, in bytes


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a loaded model that the engine needs.

    Attributes:
        config: the model's configuration, or None.
        vocab_size: the size of the vocabulary.
        context: the maximum context length; None: unlimited.
        groups: the layers with a cache, grouped by retention.
        memory: the cache size in bytes.
        free: free memory on the device in bytes; ``sys.maxsize`` if unknown.
        needs_whole_prompts: whether a step must take a prompt whole.
    """

    config: Any
    vocab_size: int
    context: int | None
    groups: tuple[LayerGroup, ...]
    memory: int
    free: int = sys.maxsize
    needs_whole_prompts: bool = False


def share_of_host(free: int) -> int:
    """Return the default cache size in bytes, given the host's *free* memory."""
    return min(free // 4, _HOST_MEMORY)


class Worker:
    """One rank of an engine.

    An executor calls, in this order: :meth:`init_device`, :meth:`load_model`, :meth:`facts`,
    :meth:`allocate`, :meth:`warm_up`, and :meth:`execute` for every step. Calls that may be in
    another process take and return plain data.

    Args:
        model: the directory of a checkpoint.
        config: the engine's configuration.
        platform: the platform of the device.
        rank: the worker's rank, and the index of its device on this machine.
    """

    def __init__(
        self, model: str | Path, config: EngineConfig, platform: Platform, rank: int = 0
    ) -> None:
        self.path, self.config, self.platform, self.rank = Path(model), config, platform, rank

    def init_device(self) -> None:
        """Initialize the device."""
        self.platform.set_device(self.rank)
        # Not earlier: a platform may register its device type with torch in set_device().
        kind = self.platform.device_type
        self.device = torch.device(kind) if kind == "cpu" else torch.device(kind, self.rank)
        self.platform.seed_all(self.config.seed)

    def load_model(self, progress: Progress | None = None) -> None:
        """Load the checkpoint.

        Args:
            progress: called with the number of tensors loaded so far and in total.

        Raises:
            EngineError, ModelError: the checkpoint is missing, damaged or not supported.
        """
        with compilation_config(self.config.compilation) as compiling, self.device:
            loaded = load_model(
                self.path,
                dtype=self.config.dtype,
                load_format=self.config.load_format,
                model_impl=self.config.model_impl,
                seed=self.config.seed,
                progress=progress,
            )
        warn_of_unused_ops(compiling)
        warn_of_unused_replacements()
        model = as_language_model(loaded).to(self.device)
        self.platform.post_load_model(model)
        runner: type[ModelRunner] = resolve_obj_by_qualname(
            self.platform.get_model_runner_cls(self.config)
        )
        self.runner = runner(model, self.config, self.platform, self.device)
        self.runner.progress = progress

    def facts(self) -> ModelFacts:
        """Return the facts about the model that the engine needs."""
        model = self.runner.model
        return ModelFacts(
            getattr(model, "config", None),
            model.vocab_size,
            model.max_positions,
            tuple(self.runner.groups),
            self._cache_memory(self.config.cache),
            self._free_memory(),
            model.needs_whole_prompts,
        )

    def allocate(self, plan: CachePlan) -> None:
        """Allocate the cache.

        Raises:
            UnsupportedCacheError: an attention backend does not support a layer's cache.
        """
        self.runner.allocate(plan)

    def warm_up(self) -> None:
        """Compile the model, and select the implementation of every op."""
        self.runner.warm_up()
        self.platform.synchronize()

    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        """Compute one step; see :meth:`ModelRunner.execute`."""
        return self.runner.execute(steps)

    def _cache_memory(self, cache: CacheConfig) -> int:
        if cache.memory_bytes is not None:
            return cache.memory_bytes
        free, total = self.platform.memory_info(self.rank)
        if self.platform.capabilities.unified_memory:
            return share_of_host(free)
        return max(0, free - int(total * (1 - cache.memory_utilization)))

    def _free_memory(self) -> int:
        try:
            return self.platform.memory_info(self.rank)[0]
        except UnsupportedByPlatformError:
            return sys.maxsize

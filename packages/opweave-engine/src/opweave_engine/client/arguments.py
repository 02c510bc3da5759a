"""Merges an engine's direct arguments with its configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from opweave.config import EngineConfig
from opweave.ir import IrOpPriorityConfig
from opweave_engine.core import EngineCore
from opweave_engine.errors import InvalidArgumentError
from opweave_engine.loading.checkpoint import Progress
from opweave_engine.loading.loader import check_dtype
from opweave_engine.priorities import PriorityLists, engine_priorities, private_context

T = TypeVar("T")


def make_core(
    model: str | Path,
    *,
    dtype: str | torch.dtype,
    seed: int,
    ir_op_priority: PriorityLists | None,
    config: EngineConfig | None,
    progress: Progress | None,
) -> tuple[EngineCore, IrOpPriorityConfig]:
    """Build an engine core, and return it with the priorities that its forwards run under.

    Raises:
        InvalidArgumentError: an argument is wrong or conflicts with *config*, or *config* asks for
            several replicas.
        IrError: an op or provider is unknown.
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.
    """
    given = EngineConfig() if config is None else config
    if not isinstance(given, EngineConfig):
        raise InvalidArgumentError(f"config={config!r} is not an EngineConfig.")
    check_alone(given)
    dtype = check_dtype(_once("dtype", check_dtype(dtype), given.dtype, default="auto"))
    seed = _check_seed(_once("seed", seed, given.seed, default=0))
    priorities = engine_priorities(ir_op_priority, given)
    with private_context(priorities) as context:
        typed = replace(given, dtype=dtype, seed=seed)
        return context.run(EngineCore, model, typed, progress=progress), priorities


def check_alone(config: EngineConfig) -> None:
    """Raise :class:`InvalidArgumentError` if *config* asks for several replicas of an engine."""
    size = config.parallel.data_parallel_size
    if size > 1:
        raise InvalidArgumentError(
            f"data_parallel_size={size}: this class runs a single engine without replicas. For "
            "several replicas, use opweave serve, or opweave_engine.open_engine with asyncio."
        )


def _once(name: str, direct: T, configured: T, *, default: T) -> T:
    if default not in (direct, configured) and direct != configured:
        raise InvalidArgumentError(
            f"{name} is given twice: {direct!r}, and {configured!r} in config. Give it once."
        )
    return configured if direct == default else direct


def _check_seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InvalidArgumentError(f"seed={seed!r} must be an integer from 0.")
    return seed

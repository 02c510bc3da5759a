"""A model's forward, compiled as the configuration says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from opweave.config import CompilationConfig, CompilationMode
from opweave.engine.errors import InvalidArgumentError
from opweave.ir.errors import did_you_mean

Forward = Callable[[Tensor, Tensor], Tensor]


def check_backend(config: CompilationConfig) -> None:
    """Raise :class:`InvalidArgumentError` if torch has no such backend."""
    if config.backend not in torch.compiler.list_backends(exclude_tags=()):
        raise InvalidArgumentError(
            f"compilation_config: backend {config.backend!r} is none of torch.compile's. "
            f"{did_you_mean(config.backend, torch.compiler.list_backends())}"
        )


def compiled_forward(model: nn.Module, config: CompilationConfig) -> Forward:
    """Return ``model(ids, positions)``, compiled for any number of tokens unless *config* says no.

    In mode ``OPWEAVE_COMPILE``, backend ``inductor`` means opweave's passes and then Inductor.
    """
    if not config.compiles:
        return model
    own = config.mode == CompilationMode.OPWEAVE_COMPILE and config.backend == "inductor"
    forward: Forward = torch.compile(
        model,
        backend="opweave" if own else config.backend,
        dynamic=True,
        fullgraph=config.mode != CompilationMode.STOCK_TORCH_COMPILE,
    )
    return forward

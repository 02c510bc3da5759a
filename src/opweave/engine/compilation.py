"""A model's forward, compiled as the configuration says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opweave.config import CompilationConfig, CompilationMode
from opweave.engine.errors import InvalidArgumentError
from opweave.ir.errors import did_you_mean
from opweave.plugins import resolve_obj_by_qualname

Forward = Callable[[Tensor, Tensor], Tensor]


def check_backend(config: CompilationConfig) -> None:
    """Check that the backend exists: one of torch's, or the ``"package.module:function"`` named.

    Raises:
        InvalidArgumentError: torch has no such backend.
        ReferenceNameError: (an ImportError) there is no such function.
    """
    if callable(_backend(config.backend)):
        return
    if config.backend not in torch.compiler.list_backends(exclude_tags=()):
        raise InvalidArgumentError(
            f"compilation_config: backend {config.backend!r} is none of torch.compile's. "
            f"{did_you_mean(config.backend, torch.compiler.list_backends())}"
        )


def _backend(name: str) -> str | Callable[..., Any]:
    """Return what ``torch.compile`` takes: a name that it knows, or the function that *name* is."""
    if ":" not in name:
        return name
    found: Callable[..., Any] = resolve_obj_by_qualname(name)
    return found


def compiled_forward(model: nn.Module, config: CompilationConfig) -> Forward:
    """Return ``model(ids, positions)``, compiled for any number of tokens unless *config* says no.

    In mode ``OPWEAVE_COMPILE``, backend ``inductor`` means opweave's passes and then Inductor.
    """
    if not config.compiles:
        return model
    own = config.mode == CompilationMode.OPWEAVE_COMPILE and config.backend == "inductor"
    forward: Forward = torch.compile(
        model,
        backend="opweave" if own else _backend(config.backend),
        dynamic=True,
        fullgraph=config.mode != CompilationMode.STOCK_TORCH_COMPILE,
    )
    return forward

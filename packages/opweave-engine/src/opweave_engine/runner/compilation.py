"""Compilation of a model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opweave.config import CompilationConfig, CompilationMode, EngineConfig
from opweave.ir.errors import did_you_mean
from opweave.plugins import resolve_obj_by_qualname
from opweave_engine.errors import InvalidArgumentError

Forward = Callable[[Tensor, Tensor], Tensor]

# Dynamo limits the graphs of one function, which the models of all engines in a process share.
# torch 2.13 can count them by engine; before, another engine may need torch.compiler.reset().
_BY_ENGINE = "isolate_recompiles"
_ISOLATED: dict[str, Any] = (
    {_BY_ENGINE: True} if _BY_ENGINE in inspect.signature(torch.compile).parameters else {}
)


def check_backend(config: CompilationConfig) -> None:
    """Check that the backend exists: one of torch's, or the ``"package.module:function"`` named.

    Raises:
        InvalidArgumentError: the backend of torch or the option of Inductor does not exist.
        OptionError: the option of opweave's passes does not exist.
        ReferenceNameError: (an ImportError) the function does not exist.
    """
    if callable(_backend(config.backend)):
        return
    # torch loads all of its compiler to list the backends; the default is always one of them.
    is_default = config.backend == CompilationConfig.backend
    if not is_default and config.backend not in torch.compiler.list_backends(exclude_tags=()):
        raise InvalidArgumentError(
            f"compilation_config: backend {config.backend!r} is not a backend of torch.compile. "
            f"{did_you_mean(config.backend, torch.compiler.list_backends())}"
        )
    if config.compiles and config.backend_options:
        _check_options(config)


def _check_options(config: CompilationConfig) -> None:
    from opweave.compile import CompileOptions, compat

    if config.uses_passes:
        CompileOptions.parse(config.backend_options)
    elif config.backend == "inductor":
        known = compat.inductor_option_names()
        for name in config.backend_options:
            if name.replace("-", "_") not in known:
                raise InvalidArgumentError(
                    f"compilation_config: Inductor has no option {name!r}. "
                    f"{did_you_mean(name, sorted(known))} Those of opweave's passes need mode="
                    f"{CompilationMode.OPWEAVE_COMPILE.name}."
                )


def _backend(name: str) -> str | Callable[..., Any]:
    """Return the backend for ``torch.compile``: a registered name, or a function."""
    if ":" not in name:
        return name
    found: Callable[..., Any] = resolve_obj_by_qualname(name)
    return found


def compiled_forward(model: nn.Module, config: CompilationConfig) -> Forward:
    """Return ``model(ids, positions)``, compiled for any number of tokens if *config* compiles.

    In mode ``OPWEAVE_COMPILE``, backend ``inductor`` means opweave's passes and then Inductor.
    """
    if not config.compiles:
        return model
    forward: Forward = torch.compile(
        model,
        backend="opweave" if config.uses_passes else _backend(config.backend),
        dynamic=True,
        fullgraph=config.mode != CompilationMode.STOCK_TORCH_COMPILE,
        options=dict(config.backend_options) or None,
        **_ISOLATED,
    )
    return forward


def graph_sizes(config: EngineConfig) -> list[int]:
    """Return the smallest number of tokens of each graph, in ascending order.

    A graph runs for all numbers up to the next graph's. Running the model once with each of these
    numbers compiles all graphs. ``torch.compile`` has one graph for one token and one for more;
    sequence parallelism, one for few and one for many tokens per rank; and ``compile_ranges``, one
    for each range.
    """
    compiling = config.compilation
    if not compiling.compiles:
        return [1]
    found = {1, 2}
    if compiling.uses_passes:
        found |= _sizes_of_passes(config)
    most = config.scheduler.max_num_batched_tokens
    return sorted(size for size in found if size <= most)


def _sizes_of_passes(config: EngineConfig) -> set[int]:
    from opweave.compile import CompileOptions
    from opweave.compile.sharding import MIN_ROWS

    options = CompileOptions.parse(config.compilation.backend_options)
    found = {size for low, high in options.ranges for size in (low, high + 1) if size > 0}
    ranks = config.parallel.tensor_parallel_size
    if options.sequence_parallelism and ranks > 1:
        found.add(MIN_ROWS * ranks)
    return found

"""The classes that an engine is made of: those that the platform names, or opweave's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opweave.platforms import Platform
from opweave.plugins import resolve_obj_by_qualname
from opweave_engine.sampling.params import SamplingParams

_DEFAULT_CLASSES: Mapping[str, Callable[..., str]] = {
    "get_worker_cls": lambda platform, config: "opweave_engine.runner.Worker",
    "get_model_runner_cls": lambda platform, config: "opweave_engine.runner.ModelRunner",
    "get_scheduler_cls": lambda platform, config: "opweave_engine.scheduler.Scheduler",
    "get_executor_cls": lambda platform, config: (
        "opweave_engine.parallel.executor.InProcessExecutor"
        if config.parallel.tensor_parallel_size == 1
        else "opweave_engine.parallel.executor.RankedExecutor"
    ),
    "get_sampler_cls": lambda platform, config: "opweave_engine.sampling.sampler.Sampler",
    "get_attn_backend_cls": lambda platform, spec: (
        "opweave_engine.attention.LatentPagedAttention"
        if spec.is_latent
        else "opweave_engine.attention.PagedAttention"
    ),
    "get_device_communicator_cls": lambda platform: (
        "opweave_engine.parallel.communicators.SharedMemoryCommunicator"
        if platform.name == "cpu"
        else "opweave_engine.parallel.communicators.TorchCommunicator"
    ),
}


def part(platform: Platform, method: str, *arguments: Any) -> Any:
    """Return the class that a method of *platform* names, or opweave's own if it returns None.

    Args:
        platform: the platform.
        method: the method, such as ``"get_worker_cls"``.
        arguments: its arguments.

    Raises:
        ReferenceNameError: (an ImportError) the name cannot be resolved.
    """
    name = getattr(platform, method)(*arguments)
    return own_part(platform, method, *arguments) if name is None else resolve_obj_by_qualname(name)


def own_part(platform: Platform, method: str, *arguments: Any) -> Any:
    """Return opweave's own class for a method that returns None."""
    return resolve_obj_by_qualname(_DEFAULT_CLASSES[method](platform, *arguments))


def supports(part: object, method: str, instead_of: str) -> bool:
    """Whether *part* may be called by *method* instead of by another one.

    A platform's class that replaces the other method alone would be bypassed.
    """
    classes = (vars(kind) for kind in type(part).__mro__)
    return next((method in c for c in classes if method in c or instead_of in c), False)


def default_request() -> SamplingParams:
    """Return the sampling parameters of a request that sets none."""
    return SamplingParams()

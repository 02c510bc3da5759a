"""The names of classes and functions lead to what they should be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

from opweave.config import EngineConfig
from opweave.conformance.check import Findings, raised
from opweave.conformance.compat import lookup_backend
from opweave.conformance.platform.check import PlatformCheck
from opweave.conformance.platform.checks.contract import attention_spec
from opweave.conformance.platform.subject import PlatformSubject
from opweave.platforms import Platform
from opweave.plugins import resolve_obj_by_qualname

_BY_CONFIG: dict[str, Callable[[Platform, EngineConfig], str]] = {
    "get_worker_cls": lambda p, c: p.get_worker_cls(c),
    "get_model_runner_cls": lambda p, c: p.get_model_runner_cls(c),
    "get_scheduler_cls": lambda p, c: p.get_scheduler_cls(c),
    "get_executor_cls": lambda p, c: p.get_executor_cls(c),
    "get_sampler_cls": lambda p, c: p.get_sampler_cls(c),
    "get_attn_backend_cls": lambda p, c: p.get_attn_backend_cls(attention_spec(p)),
    "get_device_communicator_cls": lambda p, c: p.get_device_communicator_cls(),
}


class _Defaults(Platform):
    """A platform that brings nothing of its own: what opweave's parts are called."""

    name, device_type = "defaults", "cpu"


def _run(subject: PlatformSubject) -> Findings:
    config, defaults = EngineConfig(), _Defaults()
    for member, name_of in _BY_CONFIG.items():
        name = name_of(subject.platform, config)
        yield _said(member, _class_problem(name, name_of(defaults, config)))
    backend = subject.platform.get_compile_backend(config)
    yield _said("get_compile_backend", _backend_problem(backend))
    for name in subject.platform.extra_passes(config):
        yield _said("extra_passes", _pass_problem(name))


def _said(member: str, problems: Iterator[str]) -> str | None:
    try:
        problem = next(problems, None)
    except Exception as error:
        problem = raised(error)
    return f"{member}: {problem}" if problem else None


def _class_problem(name: str, default: str) -> Iterator[str]:
    """Return why *name* is not a class that can replace opweave's *default*."""
    if name == default:
        return
    found = resolve_obj_by_qualname(name)
    if not isinstance(found, type):
        yield f"{name!r} is {found!r}, not a class"
    elif not issubclass(found, model := resolve_obj_by_qualname(default)):
        missing = [each for each in _methods(model) if not callable(getattr(found, each, None))]
        if missing:
            yield f"{name!r} has no {', '.join(missing)}, as {default!r} has"


def _methods(cls: type) -> list[str]:
    return [each for each, _ in inspect.getmembers(cls, callable) if not each.startswith("_")]


def _backend_problem(name: str) -> Iterator[str]:
    found = resolve_obj_by_qualname(name) if ":" in name else lookup_backend(name)
    if not callable(found):
        yield f"{name!r} is {found!r}, and no function"


def _pass_problem(name: str) -> Iterator[str]:
    found = resolve_obj_by_qualname(name)
    if not callable(found):
        yield f"{name!r} is {found!r}, and no function"
        return
    try:
        inspect.signature(found).bind("graph", "context")
    except TypeError as error:
        yield f"{name!r} cannot be called with a graph and a context: {error}"


CHECK = PlatformCheck(
    "references",
    "every class that the platform names exists and can replace opweave's",
    _run,
)

"""Every member can be called, and returns what the contract says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from opweave.config import EngineConfig
from opweave.config.patches import ConfigPatch
from opweave.config.plugin_options import PluginOptions
from opweave.config.typed import check_kind
from opweave.conformance.check import Findings, raised
from opweave.conformance.platform.check import PlatformCheck
from opweave.conformance.platform.subject import PlatformSubject
from opweave.platforms import AttentionSpec, DeviceCapability, Platform
from opweave.platforms.contract import check_object
from opweave.plugins import resolve_obj_by_qualname


class Member(NamedTuple):
    """How a method is called here, and what it must return."""

    call: Callable[[Platform], Any]
    wanted: str
    fits: Callable[[Any], bool]


class _Options(PluginOptions):
    """Takes declarations of options, and keeps none."""

    def add(self, key: str, kind: type, default: Any, help: str) -> None:
        check_kind(key, kind, default)
        if not key.isidentifier() or not help.strip():
            raise ValueError(f"option {key!r} needs an identifier and a help text")


def attention_spec(platform: Platform) -> AttentionSpec:
    """Return attention that every platform for language models should know."""
    dtype = platform.supported_dtypes[0]
    return AttentionSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype=dtype)


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _texts(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_text, value))


def _nothing(value: object) -> bool:
    return value is None


def _lists(value: object) -> bool:
    return isinstance(value, Mapping) and all(_text(k) and _texts(v) for k, v in value.items())


def _patches(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(each, ConfigPatch) for each in value)


def _memory(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    free, total = value
    return all(type(each) is int for each in value) and 0 <= free <= total and total > 0


def _capability(value: object) -> bool:
    return value is None or isinstance(value, DeviceCapability)


def _recorder(value: object) -> bool:
    return value is None or callable(getattr(value, "record", None))


def _facts(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_text, value)) and bool(json.dumps(dict(value)))


def _default_request(platform: Platform) -> Any:
    return platform.validate_request(resolve_obj_by_qualname("opweave_engine.SamplingParams")())


def _priorities(platform: Platform) -> object:
    found = [platform.get_default_ir_op_priority(config) for config in (None, EngineConfig())]
    return next((lists for lists in found if not _lists(lists)), found[0])


def _gradients(platform: Platform) -> bool:
    with platform.inference_mode():
        return torch.is_grad_enabled()


def _post_load(platform: Platform) -> Any:
    dtype, device = platform.supported_dtypes[0], platform.device_type
    return platform.post_load_model(nn.Linear(4, 4).to(device=device, dtype=dtype))


_NAME = "the qualified name of a class"
_LISTS = "a mapping of ops to lists of providers"

MEMBERS: Mapping[str, Member] = {
    "extend_cli": Member(lambda p: p.extend_cli(_Options(p.name)), "nothing", _nothing),
    "config_defaults": Member(
        lambda p: p.config_defaults(EngineConfig()), "a list of ConfigPatch", _patches
    ),
    "check_and_update_config": Member(
        lambda p: p.check_and_update_config(EngineConfig()), "a list of ConfigPatch", _patches
    ),
    "validate_request": Member(_default_request, "nothing for the default request", _nothing),
    "import_kernels": Member(lambda p: p.import_kernels(), "nothing, however often", _nothing),
    "get_default_ir_op_priority": Member(_priorities, _LISTS, _lists),
    "default_custom_ops": Member(
        lambda p: p.default_custom_ops(EngineConfig()), "a list of strings", _texts
    ),
    "get_worker_cls": Member(lambda p: p.get_worker_cls(EngineConfig()), _NAME, _text),
    "get_model_runner_cls": Member(lambda p: p.get_model_runner_cls(EngineConfig()), _NAME, _text),
    "get_scheduler_cls": Member(lambda p: p.get_scheduler_cls(EngineConfig()), _NAME, _text),
    "get_executor_cls": Member(lambda p: p.get_executor_cls(EngineConfig()), _NAME, _text),
    "get_sampler_cls": Member(lambda p: p.get_sampler_cls(EngineConfig()), _NAME, _text),
    "get_attn_backend_cls": Member(
        lambda p: p.get_attn_backend_cls(attention_spec(p)), _NAME, _text
    ),
    "get_device_communicator_cls": Member(lambda p: p.get_device_communicator_cls(), _NAME, _text),
    "get_compile_backend": Member(
        lambda p: p.get_compile_backend(EngineConfig()), "the name of a backend", _text
    ),
    "extra_passes": Member(lambda p: p.extra_passes(EngineConfig()), "a list of names", _texts),
    "get_device_name": Member(lambda p: p.get_device_name(0), "a name", _text),
    "get_device_capability": Member(
        lambda p: p.get_device_capability(0), "a DeviceCapability or None", _capability
    ),
    "set_device": Member(lambda p: p.set_device(0), "nothing", _nothing),
    "memory_info": Member(
        lambda p: p.memory_info(0), "free and total bytes, 0 <= free <= total", _memory
    ),
    "graph_recorder": Member(
        lambda p: p.graph_recorder(), "an object with a method record, or None", _recorder
    ),
    "synchronize": Member(lambda p: p.synchronize(), "nothing", _nothing),
    "seed_all": Member(lambda p: p.seed_all(0), "nothing", _nothing),
    "inference_mode": Member(
        _gradients, "a context in which no gradients are recorded", lambda enabled: not enabled
    ),
    "post_load_model": Member(_post_load, "nothing", _nothing),
    "doctor": Member(lambda p: p.doctor(), "a mapping that is valid JSON", _facts),
}


def _run(subject: PlatformSubject) -> Findings:
    check_object(subject.platform, Platform, subject.qualname)
    yield None
    for name, member in MEMBERS.items():
        yield _problem(subject.platform, name, member)


def _problem(platform: Platform, name: str, member: Member) -> str | None:
    try:
        found = member.call(platform)
        if member.fits(found):
            return None
    except Exception as error:
        return f"{name} {raised(error)}"
    return f"{name} returns {found!r}; it should be {member.wanted}"


CHECK = PlatformCheck(
    "contract", "every member can be called and returns the documented type", _run
)

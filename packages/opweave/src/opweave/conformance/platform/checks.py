"""The checks of a platform, and its verification with all of them."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import ScalingType

from opweave import torch_compat
from opweave.config import EngineConfig
from opweave.config.patches import ConfigPatch
from opweave.config.plugin_options import PluginOptions
from opweave.config.values import check_kind
from opweave.conformance.platform.subject import PlatformCheck, PlatformSubject, ask
from opweave.conformance.subject import (
    Findings,
    NonconformingError,
    Outcome,
    Subject,
    UnknownCheckError,
    raised,
)
from opweave.conformance.verify import verify
from opweave.ir import IrError, current_registry
from opweave.ir.errors import did_you_mean
from opweave.ir.priority import EVERY_OP, NATIVE, parse
from opweave.ir.tolerance import DEFAULT_TOLERANCES
from opweave.platforms import AttentionSpec, DeviceCapability, Platform, configured, resolution
from opweave.platforms.base import check_object
from opweave.platforms.resolution import VARIABLE
from opweave.plugins import resolve_obj_by_qualname

# Every member can be called, and returns what the contract says.


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


def _class_name(value: object) -> bool:
    return value is None or _text(value)


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


_NAME = "the qualified name of a class, or None"
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
    "get_worker_cls": Member(lambda p: p.get_worker_cls(EngineConfig()), _NAME, _class_name),
    "get_model_runner_cls": Member(
        lambda p: p.get_model_runner_cls(EngineConfig()), _NAME, _class_name
    ),
    "get_scheduler_cls": Member(lambda p: p.get_scheduler_cls(EngineConfig()), _NAME, _class_name),
    "get_executor_cls": Member(lambda p: p.get_executor_cls(EngineConfig()), _NAME, _class_name),
    "get_sampler_cls": Member(lambda p: p.get_sampler_cls(EngineConfig()), _NAME, _class_name),
    "get_attn_backend_cls": Member(
        lambda p: p.get_attn_backend_cls(attention_spec(p)), _NAME, _class_name
    ),
    "get_device_communicator_cls": Member(
        lambda p: p.get_device_communicator_cls(), _NAME, _class_name
    ),
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


def _check_contract(subject: PlatformSubject) -> Findings:
    check_object(subject.platform, Platform, subject.qualname)
    yield None
    for name, member in MEMBERS.items():
        yield _contract_problem(subject.platform, name, member)


def _contract_problem(platform: Platform, name: str, member: Member) -> str | None:
    try:
        found = member.call(platform)
        if member.fits(found):
            return None
    except Exception as error:
        return f"{name} {raised(error)}"
    return f"{name} returns {found!r}; it should be {member.wanted}"


CONTRACT = PlatformCheck(
    "contract", "every member can be called and returns the documented type", _check_contract
)


# The function that claims the device is quick and pure, and starts nothing.


_SECONDS = 1.0  # it runs in every process, before anything else

# The same question twice in a process. A runtime is started if torch's module of a device says so.
_CLAIM_CODE = """
import json, time, torch
from opweave.plugins import resolve_obj_by_qualname
claim = resolve_obj_by_qualname({reference!r})
start = time.perf_counter()
answers = [repr(claim()) for _ in range(2)]
seconds = time.perf_counter() - start
devices = {{"cuda", "xpu", {device!r}}} - {{"cpu"}}
modules = [(name, getattr(torch, name, None)) for name in sorted(devices)]
started = [name for name, module in modules if getattr(module, "is_initialized", bool)()]
print(json.dumps([answers, seconds, started]))
"""


def _check_claim(subject: PlatformSubject) -> Findings:
    if subject.claim is None:
        return
    code = _CLAIM_CODE.format(reference=subject.claim, device=subject.platform.device_type)
    yield from _problems(ask(code, {}, {}), subject.claim)


def _problems(told: list[Any], reference: str) -> Findings:
    answers = {answer for given, _, _ in told for answer in given}
    seconds = min(seconds for _, seconds, _ in told)
    started = sorted({name for *_, names in told for name in names})
    different = " and ".join(sorted(answers))
    yield f"{reference} gives different answers: {different}" if len(answers) > 1 else None
    yield f"{reference} says that its device is not here" if answers == {"None"} else None
    yield (
        f"{reference} takes {seconds:.1f} s for two calls; at most {_SECONDS:.0f} s is fair"
        if seconds > _SECONDS
        else None
    )
    yield (
        f"{reference} starts the runtime of {', '.join(started)}: processes that fork or choose "
        "a device later could not use it"
        if started
        else None
    )


CLAIM = PlatformCheck(
    "claim",
    "the plugin's function is fast and repeatable, and does not start a device runtime",
    _check_claim,
)


# The platform's changes to a configuration are valid and final.


def _check_configuration(subject: PlatformSubject) -> Findings:
    config = configured(EngineConfig(), subject.platform)
    yield None
    if configured(config, subject.platform) == config:
        yield None
    else:
        yield "it changes a configuration again that it has already adapted"


CONFIGURATION = PlatformCheck(
    "configuration",
    "configuration patches have an existing key, a valid value and a reason, and are stable",
    _check_configuration,
)


# Tensors reach the device and come back.


_SHAPES = ((3, 5), (1,), (0, 4), (17, 2, 9))


def _check_device(subject: PlatformSubject) -> Findings:
    platform = subject.platform
    platform.set_device(0)
    for dtype in (*platform.supported_dtypes, torch.int64, torch.bool):
        for shape in _SHAPES:
            host = (torch.rand(shape) * 100).to(dtype)
            yield _round_trip(platform, host)
        yield _round_trip(platform, (torch.rand(6, 4) * 100).to(dtype).t()[1::2])


def _round_trip(platform: Platform, host: Tensor) -> str | None:
    there = host.to(platform.device_type)
    platform.synchronize()
    what = f"{host.dtype} tensor of shape {tuple(host.shape)}, strides {host.stride()},"
    if there.device.type != platform.device_type:
        return f"a {what} sent to {platform.device_type!r} is on {there.device}"
    if (there.shape, there.dtype) != (host.shape, host.dtype):
        return f"a {what} is {there.dtype} of shape {tuple(there.shape)} on the device"
    return None if _same(there.cpu(), host) else f"a {what} comes back with other values"


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.tolist() == b.tolist()


DEVICE = PlatformCheck(
    "device",
    "tensors of every supported dtype survive a copy to the device and back",
    _check_device,
)


# The device has the capabilities that the platform declares.


_SIZE = 32  # a multiple of what matrix units ask for


def _check_capabilities(subject: PlatformSubject) -> Findings:
    platform = subject.platform
    for dtype in platform.supported_dtypes:
        yield _false_claim(
            f"{dtype} is in supported_dtypes", partial(_matmul, dtype=dtype), platform
        )
    for name, show in SHOWN.items():
        if getattr(platform.capabilities, name):
            yield _false_claim(f"the capability {name} is claimed", show, platform)


def _false_claim(
    claim: str, show: Callable[[Platform], str | None], platform: Platform
) -> str | None:
    try:
        problem = show(platform)
    except Exception as error:
        problem = raised(error)
    return f"{claim}, but {problem}" if problem else None


def _matmul(platform: Platform, dtype: torch.dtype) -> str | None:
    a, b = (torch.randint(-4, 5, (_SIZE, _SIZE)).to(dtype) for _ in range(2))
    found = (a.to(platform.device_type) @ b.to(platform.device_type)).cpu()
    return _compared(found.double(), a.double() @ b.double(), dtype, f"a product in {dtype}")


def _bf16(platform: Platform) -> str | None:
    if torch.bfloat16 not in platform.supported_dtypes:
        return "torch.bfloat16 is not in supported_dtypes"
    return _matmul(platform, torch.bfloat16)


def _fp8(platform: Platform) -> str | None:
    a, b = (torch.randint(-4, 5, (_SIZE, _SIZE)).float() for _ in range(2))
    there = [t.to(torch.float8_e4m3fn).to(platform.device_type) for t in (a, b.t().contiguous())]
    one = torch.ones((), device=platform.device_type)
    found = functional.scaled_mm(
        there[0],
        there[1].t(),
        scale_a=one,
        scale_recipe_a=ScalingType.TensorWise,
        scale_b=one,
        scale_recipe_b=ScalingType.TensorWise,
        output_dtype=torch.bfloat16,
    )
    return _compared(found.cpu().float(), a @ b, torch.bfloat16, "a product in float8_e4m3fn")


def _int8(platform: Platform) -> str | None:
    a, b = (torch.randint(-128, 128, (_SIZE, _SIZE), dtype=torch.int8) for _ in range(2))
    found = torch_compat.multiply_int8(a.to(platform.device_type), b.to(platform.device_type))
    exact = a.int() @ b.int()
    if found.dtype != torch.int32 or not torch.equal(found.cpu(), exact):
        return "a product in int8 is not exact in int32"
    return None


def _streams(platform: Platform) -> str | None:
    first, second = (torch.Stream(device=platform.device_type) for _ in range(2))
    return "two streams are the same one" if first == second else None


def _graph_capture(platform: Platform) -> str | None:
    module = torch.get_device_module(platform.device_type)
    found = callable(getattr(module, "graph", None))
    return None if found else f"torch.{platform.device_type} has no graph()"


def _pinned_memory(platform: Platform) -> str | None:
    pinned = torch.empty(4, pin_memory=True).is_pinned()
    return None if pinned else "torch.empty(pin_memory=True) is not pinned"


def _unified_memory(platform: Platform) -> str | None:
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = platform.memory_info(0)[1]
    return f"memory_info says {total} bytes, and the host has {host}" if total > host else None


def _compared(found: Tensor, exact: Tensor, dtype: torch.dtype, what: str) -> str | None:
    _, rtol = DEFAULT_TOLERANCES.get(dtype, DEFAULT_TOLERANCES[torch.float32])
    worst = (found.to(exact.dtype) - exact).abs().max().item()
    allowed = rtol * max(exact.abs().max().item(), 1.0) + 1e-4
    return None if worst <= allowed else f"{what} is off by {worst:.3g}"  # NaN is off, too


SHOWN: Mapping[str, Callable[[Platform], str | None]] = {
    "bf16": _bf16,
    "fp8": _fp8,
    "int8": _int8,
    "streams": _streams,
    "graph_capture": _graph_capture,
    "pinned_memory": _pinned_memory,
    "unified_memory": _unified_memory,
}

CAPABILITIES = PlatformCheck(
    "capabilities",
    "models can compute in every supported dtype; declared capabilities work",
    _check_capabilities,
)


# A seed makes random numbers reproducible, on the device and the host.


def _check_seed(subject: PlatformSubject) -> Findings:
    platform = subject.platform
    for device in dict.fromkeys((platform.device_type, "cpu")):
        first, again, other = (_drawn(platform, seed, device) for seed in (1, 1, 2))
        yield None if first == again else f"seed_all(1) twice gives different numbers on {device}"
        yield None if first != other else f"seed_all(1) and seed_all(2) give the same on {device}"


def _drawn(platform: Platform, seed: int, device: str) -> list[float]:
    platform.seed_all(seed)
    numbers: list[float] = torch.rand(64, device=device).cpu().tolist()
    return numbers


SEED = PlatformCheck(
    "seed", "seed_all makes random numbers reproducible, on the device and host", _check_seed
)


# The default priorities name ops and providers that exist.


def _check_priorities(subject: PlatformSubject) -> Findings:
    for config in (None, EngineConfig()):
        for op, providers in subject.platform.get_default_ir_op_priority(config).items():
            yield _priority_problem(op, providers)


def _priority_problem(op: str, providers: list[str]) -> str | None:
    if op == EVERY_OP:
        return _unknown(providers)
    try:
        current_registry().op(op).check_providers(parse(providers, "platform default"))
    except IrError as error:
        return str(error)
    return None


def _unknown(providers: list[str]) -> str | None:
    known = {name for op in current_registry().ops.values() for name in op.impls}
    for entry in parse(providers, "platform default"):
        if entry.provider not in known:
            return f"'*': no op has the provider {entry.provider!r}. " + did_you_mean(
                entry.provider, known
            )
    return None


PRIORITIES = PlatformCheck(
    "priorities", "the default priorities name registered ops and providers", _check_priorities
)


# The names of classes and functions lead to what they should be.


_OWN_PART = "opweave_engine.parts.own_part"


def _check_references(subject: PlatformSubject) -> Findings:
    config, platform = EngineConfig(), subject.platform
    arguments: dict[str, tuple[Any, ...]] = {
        "get_worker_cls": (config,),
        "get_model_runner_cls": (config,),
        "get_scheduler_cls": (config,),
        "get_executor_cls": (config,),
        "get_sampler_cls": (config,),
        "get_attn_backend_cls": (attention_spec(platform),),
        "get_device_communicator_cls": (),
    }
    for member, given in arguments.items():
        name = getattr(platform, member)(*given)
        problems = iter(()) if name is None else _class_problem(name, platform, member, *given)
        yield _reference_problem(member, problems)
    backend = platform.get_compile_backend(config)
    yield _reference_problem("get_compile_backend", _backend_problem(backend))
    for name in platform.extra_passes(config):
        yield _reference_problem("extra_passes", _pass_problem(name))


def _reference_problem(member: str, problems: Iterator[str]) -> str | None:
    try:
        problem = next(problems, None)
    except Exception as error:
        problem = raised(error)
    return f"{member}: {problem}" if problem else None


def _class_problem(name: str, platform: Platform, member: str, *given: Any) -> Iterator[str]:
    """Yield why *name* is not a class that can replace the one of the engine."""
    part = resolve_obj_by_qualname(name)
    if not isinstance(part, type):
        yield f"{name!r} is {part!r}, not a class"
    elif not issubclass(part, own := resolve_obj_by_qualname(_OWN_PART)(platform, member, *given)):
        missing = [each for each in _methods(own) if not callable(getattr(part, each, None))]
        if missing:
            own_name = f"{own.__module__}.{own.__qualname__}"
            yield f"{name!r} has no {', '.join(missing)}, as {own_name!r} has"


def _methods(cls: type) -> list[str]:
    return [each for each, _ in inspect.getmembers(cls, callable) if not each.startswith("_")]


def _backend_problem(name: str) -> Iterator[str]:
    found = resolve_obj_by_qualname(name) if ":" in name else torch_compat.lookup_backend(name)
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


REFERENCES = PlatformCheck(
    "references",
    "every class that the platform names exists and can replace opweave's",
    _check_references,
)


# Selected implementations compute the op's definition on the platform's device.


_CHECKS = ("values", "mutation")  # `opweave verify --platform` runs all


def _check_kernels(subject: PlatformSubject) -> Findings:
    ops = current_registry().ops
    lists = subject.platform.get_default_ir_op_priority()
    for name, op in ops.items():
        providers = lists.get(name, lists.get(EVERY_OP))
        for entry in parse(providers, "platform default") if providers else ():
            # (another check reports missing registrations)
            if entry.provider in {*op.impls} - {NATIVE}:
                yield from _verified(Subject(op, entry.provider, subject.platform.device_type))


def _verified(implementation: Subject) -> Findings:
    result = verify(implementation, _CHECKS)
    problems = [f"{result.subject} {o.check}: {p}" for o in result.outcomes for p in o.problems]
    if problems:
        yield problems[0]
    elif not result.obstacle:
        yield None


KERNELS = PlatformCheck(
    "kernels",
    "each selected implementation matches the op's definition on the device",
    _check_kernels,
)


# Processes that an engine starts find the same platform.


_CHILDREN_CODE = """
import json
from opweave.platforms import resolution
print(json.dumps(resolution().qualname))
"""


def _check_children(subject: PlatformSubject) -> Findings:
    if subject.claimant is None:
        return
    told = [{"OPWEAVE_PLATFORM": subject.claimant}]
    if subject.current:  # by themselves, and as an engine starts its workers
        told += [{}, {VARIABLE: resolution().to_json()}]
    for environment, found in zip(told, ask(_CHILDREN_CODE, *told), strict=True):
        how = " and ".join(f"{name} is set" for name in environment) or "nothing is set"
        same = _name(found) == _name(subject.qualname)
        yield None if same else f"a child process where {how} runs on {found}"


def _name(qualname: str) -> str:
    return qualname.replace(":", ".")


CHILDREN = PlatformCheck("children", "child processes run on the same platform", _check_children)


# The checks by name, in the order in which they run.


CHECKS: dict[str, PlatformCheck] = {
    check.name: check
    for check in (
        CONTRACT,
        CLAIM,
        CONFIGURATION,
        DEVICE,
        CAPABILITIES,
        SEED,
        PRIORITIES,
        REFERENCES,
        KERNELS,
        CHILDREN,
    )
}


# Verification of a platform.


@dataclass(frozen=True)
class PlatformResult:
    """The result of verifying a platform."""

    subject: PlatformSubject
    outcomes: tuple[Outcome, ...]

    @property
    def status(self) -> str:
        """``passed``, ``failed``, or ``none`` without anything to check."""
        if any(outcome.problems for outcome in self.outcomes):
            return "failed"
        return "passed" if any(outcome.passed for outcome in self.outcomes) else "none"

    def raise_if_failed(self) -> None:
        """Raise NonconformingError with every problem, if there is one."""
        if self.status == "failed":
            lines = [f"{o.check}: {problem}" for o in self.outcomes for problem in o.problems]
            raise NonconformingError("\n".join([f"{self.subject} fails:", *lines]))


def verify_platform(subject: PlatformSubject, checks: Iterable[str] = ()) -> PlatformResult:
    """Run every check, or those named, on a platform.

    Raises:
        UnknownCheckError: a check does not exist.
    """
    names = list(checks)
    for name in names:
        if name not in CHECKS:
            raise UnknownCheckError(f"unknown check {name!r}. {did_you_mean(name, CHECKS)}")
    chosen = [check for name, check in CHECKS.items() if not names or name in names]
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PlatformResult(subject, tuple(check.outcome(subject) for check in chosen))

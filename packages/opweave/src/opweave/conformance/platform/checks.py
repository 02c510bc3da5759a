"""The checks of a platform, and its verification with all of them."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
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
from opweave.conformance.platform.subject import PlatformCheck, PlatformSubject, ask, engine_parts
from opweave.conformance.subject import (
    Findings,
    Outcome,
    Subject,
    outcome_of,
    raise_if_failed,
    raised,
    select,
)
from opweave.conformance.verify import Result, verify
from opweave.ir import IrError, current_registry
from opweave.ir.errors import did_you_mean
from opweave.ir.priority import EVERY_OP, NATIVE, parse
from opweave.ir.tolerance import DEFAULT_TOLERANCES
from opweave.platforms import AttentionSpec, DeviceCapability, Platform, configured, resolution
from opweave.platforms.base import check_object, members
from opweave.platforms.resolution import VARIABLE
from opweave.plugins import resolve_obj_by_qualname

# Every member can be called, and returns what the contract says.


class Returns(NamedTuple):
    """The requirement for the return value of a method."""

    description: str
    fits: Callable[[Any], bool]


class _Options(PluginOptions):
    """Checks declarations of options, and does not register them."""

    def add(self, key: str, kind: type, default: Any, help: str) -> None:
        check_kind(key, kind, default)
        if not key.isidentifier() or not help.strip():
            raise ValueError(f"option {key!r} needs an identifier and a help text")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_texts(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_text, value))


def _is_priorities(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_text(k) and _is_texts(v) for k, v in value.items()
    )


def _is_patches(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(patch, ConfigPatch) for patch in value)


def _is_memory(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    free, total = value
    return all(type(size) is int for size in value) and 0 <= free <= total and total > 0


def _is_facts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value)) and bool(json.dumps({**value}))


def _disables_gradients(context: AbstractContextManager[Any]) -> bool:
    with context:
        return not torch.is_grad_enabled()


_NOTHING = Returns("nothing", lambda v: v is None)
_TEXTS = Returns("a list of strings", _is_texts)
_PATCHES = Returns("a list of ConfigPatch", _is_patches)
_CLASSES = dict.fromkeys(
    (name for name in members(Platform) if name.endswith("_cls")),
    Returns("the qualified name of a class, or None", lambda v: v is None or _is_text(v)),
)

MEMBERS: Mapping[str, Returns] = {
    "extend_cli": _NOTHING,
    "config_defaults": _PATCHES,
    "check_and_update_config": _PATCHES,
    "validate_request": Returns("nothing for the default request", lambda v: v is None),
    "import_kernels": _NOTHING,
    "get_default_ir_op_priority": Returns("a mapping of ops to lists of providers", _is_priorities),
    "default_custom_ops": _TEXTS,
    **_CLASSES,
    "get_compile_backend": Returns("the name of a backend", _is_text),
    "extra_passes": _TEXTS,
    "get_device_name": Returns("a name", _is_text),
    "get_device_capability": Returns(
        "a DeviceCapability or None", lambda v: v is None or isinstance(v, DeviceCapability)
    ),
    "set_device": _NOTHING,
    "memory_info": Returns("free and total bytes, 0 <= free <= total", _is_memory),
    "graph_recorder": Returns(
        "an object with a method record, or None",
        lambda v: v is None or callable(getattr(v, "record", None)),
    ),
    "synchronize": _NOTHING,
    "seed_all": _NOTHING,
    "inference_mode": Returns("a context that disables gradients", _disables_gradients),
    "post_load_model": _NOTHING,
    "doctor": Returns("a mapping that is valid JSON", _is_facts),
}


def _arguments(platform: Platform, method: str) -> list[Any]:
    """Return arguments for a method of the contract, by the names of its parameters."""
    dtype, device = platform.supported_dtypes[0], platform.device_type
    parts = engine_parts()
    values: dict[str, Callable[[], Any]] = {
        "options": lambda: _Options(platform.name),
        "config": EngineConfig,
        "params": lambda: parts and parts.default_request(),
        "spec": lambda: AttentionSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype=dtype),
        "model": lambda: nn.Linear(4, 4).to(device=device, dtype=dtype),
        "index": int,
        "seed": int,
    }
    _, *parameters = inspect.signature(getattr(Platform, method)).parameters
    return [values[name]() for name in parameters]


def _check_contract(subject: PlatformSubject) -> Findings:
    check_object(subject.platform, Platform, subject.qualname)
    yield None
    for name in MEMBERS:
        if name != "validate_request" or engine_parts() is not None:
            yield _contract_problem(subject.platform, name)
    yield _contract_problem(subject.platform, "get_default_ir_op_priority", with_config=False)


def _contract_problem(platform: Platform, name: str, *, with_config: bool = True) -> str | None:
    try:
        returned = getattr(platform, name)(*_arguments(platform, name) if with_config else ())
        if MEMBERS[name].fits(returned):
            return None
    except Exception as error:
        return f"{name} {raised(error)}"
    return f"{name} returns {returned!r}; it should be {MEMBERS[name].description}"


CONTRACT = PlatformCheck(
    "contract", "every member can be called and returns the documented type", _check_contract
)


# The function that claims the device is quick and pure, and starts nothing.


_MAX_CLAIM_SECONDS = 1.0  # the function runs in every process, before anything else

# Calls the function twice. Whether it started a runtime is read from torch's module of the device.
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
    yield from _claim_problems(ask(code, {}, {}), subject.claim)


def _claim_problems(replies: list[Any], reference: str) -> Findings:
    answers = {answer for both, _, _ in replies for answer in both}
    seconds = min(seconds for _, seconds, _ in replies)
    started = sorted({name for *_, names in replies for name in names})
    different = " and ".join(sorted(answers))
    too_slow = f"takes {seconds:.1f} s for two calls; at most {_MAX_CLAIM_SECONDS:.0f} s is fair"
    starts = (
        f"starts the runtime of {', '.join(started)}: processes that fork or choose a device later "
        "could not use it"
    )
    problems = {
        f"gives different answers: {different}": len(answers) > 1,
        "says that its device is not here": answers == {"None"},
        too_slow: seconds > _MAX_CLAIM_SECONDS,
        starts: bool(started),
    }
    for problem, is_found in problems.items():
        yield f"{reference} {problem}" if is_found else None


CLAIM = PlatformCheck(
    "claim",
    "the plugin's function is fast and repeatable, and does not start a device runtime",
    _check_claim,
)


# The platform's changes to a configuration are valid and final.


def _check_configuration(subject: PlatformSubject) -> Findings:
    config = configured(EngineConfig(), subject.platform)
    yield None
    is_stable = configured(config, subject.platform) == config
    yield None if is_stable else "it changes a configuration again that it has already adapted"


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
    sent = f"a {host.dtype} tensor of shape {tuple(host.shape)}, strides {host.stride()},"
    if there.device.type != platform.device_type:
        return f"{sent} sent to {platform.device_type!r} is on {there.device}"
    if (there.shape, there.dtype) != (host.shape, host.dtype):
        return f"{sent} is {there.dtype} of shape {tuple(there.shape)} on the device"
    back = there.cpu()
    is_same = back.shape == host.shape and back.tolist() == host.tolist()
    return None if is_same else f"{sent} comes back with other values"


DEVICE = PlatformCheck(
    "device",
    "tensors of every supported dtype survive a copy to the device and back",
    _check_device,
)


# The device has the capabilities that the platform declares.


_MATRIX_SIZE = 32  # a multiple of the tile sizes of matrix units


def _check_capabilities(subject: PlatformSubject) -> Findings:
    platform = subject.platform
    for dtype in platform.supported_dtypes:
        claim = f"{dtype} is in supported_dtypes, but"
        yield _prefixed_problem(claim, partial(_matmul, platform, dtype))
    for name, test in _CAPABILITY_CHECKS.items():
        if getattr(platform.capabilities, name):
            claim = f"the capability {name} is claimed, but"
            yield _prefixed_problem(claim, partial(test, platform))


def _prefixed_problem(prefix: str, test: Callable[[], str | None]) -> str | None:
    """Return the problem that *test* returns or raises after *prefix*, or None."""
    try:
        problem = test()
    except Exception as error:
        problem = raised(error)
    return f"{prefix} {problem}" if problem else None


def _matmul(platform: Platform, dtype: torch.dtype) -> str | None:
    a, b = (torch.randint(-4, 5, (_MATRIX_SIZE, _MATRIX_SIZE)).to(dtype) for _ in range(2))
    product = (a.to(platform.device_type) @ b.to(platform.device_type)).cpu()
    return _compared(product.double(), a.double() @ b.double(), dtype, f"a product in {dtype}")


def _bf16(platform: Platform) -> str | None:
    if torch.bfloat16 not in platform.supported_dtypes:
        return "torch.bfloat16 is not in supported_dtypes"
    return _matmul(platform, torch.bfloat16)


def _fp8(platform: Platform) -> str | None:
    a, b = (torch.randint(-4, 5, (_MATRIX_SIZE, _MATRIX_SIZE)).float() for _ in range(2))
    there = [t.to(torch.float8_e4m3fn).to(platform.device_type) for t in (a, b.t().contiguous())]
    one = torch.ones((), device=platform.device_type)
    product = functional.scaled_mm(
        there[0],
        there[1].t(),
        scale_a=one,
        scale_recipe_a=ScalingType.TensorWise,
        scale_b=one,
        scale_recipe_b=ScalingType.TensorWise,
        output_dtype=torch.bfloat16,
    )
    return _compared(product.cpu().float(), a @ b, torch.bfloat16, "a product in float8_e4m3fn")


def _int8(platform: Platform) -> str | None:
    shape = (_MATRIX_SIZE, _MATRIX_SIZE)
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for _ in range(2))
    product = torch_compat.multiply_int8(a.to(platform.device_type), b.to(platform.device_type))
    is_exact = product.dtype == torch.int32 and torch.equal(product.cpu(), a.int() @ b.int())
    return None if is_exact else "a product in int8 is not exact in int32"


def _streams(platform: Platform) -> str | None:
    first, second = (torch.Stream(device=platform.device_type) for _ in range(2))
    return "two streams are the same one" if first == second else None


def _graph_capture(platform: Platform) -> str | None:
    module = torch.get_device_module(platform.device_type)
    has_graph = callable(getattr(module, "graph", None))
    return None if has_graph else f"torch.{platform.device_type} has no graph()"


def _pinned_memory(platform: Platform) -> str | None:
    pinned = torch.empty(4, pin_memory=True).is_pinned()
    return None if pinned else "torch.empty(pin_memory=True) is not pinned"


def _unified_memory(platform: Platform) -> str | None:
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = platform.memory_info(0)[1]
    return f"memory_info says {total} bytes, and the host has {host}" if total > host else None


def _compared(product: Tensor, exact: Tensor, dtype: torch.dtype, name: str) -> str | None:
    _, rtol = DEFAULT_TOLERANCES.get(dtype, DEFAULT_TOLERANCES[torch.float32])
    worst = (product.to(exact.dtype) - exact).abs().max().item()
    allowed = rtol * max(exact.abs().max().item(), 1.0) + 1e-4
    is_near = worst <= allowed  # False for NaN
    return None if is_near else f"{name} is off by {worst:.3g}"


_CAPABILITY_CHECKS: Mapping[str, Callable[[Platform], str | None]] = {
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
    entries = parse(providers, "platform default")
    if op != EVERY_OP:
        try:
            current_registry().op(op).check_providers(entries)
        except IrError as error:
            return str(error)
        return None
    registered = {name for op in current_registry().ops.values() for name in op.impls}
    unknown = [e.provider for e in entries if e.provider not in registered]
    if not unknown:
        return None
    hint = did_you_mean(unknown[0], registered)
    return f"'*': no op has the provider {unknown[0]!r}. {hint}"


PRIORITIES = PlatformCheck(
    "priorities", "the default priorities name registered ops and providers", _check_priorities
)


# The names of classes and functions lead to what they should be.


def _check_references(subject: PlatformSubject) -> Findings:
    config, platform = EngineConfig(), subject.platform
    for member in _CLASSES:
        arguments = _arguments(platform, member)
        name = getattr(platform, member)(*arguments)
        if name is not None:
            test = partial(_class_problem, name, platform, member, *arguments)
            yield _prefixed_problem(f"{member}:", test)
    backend = platform.get_compile_backend(config)
    yield _prefixed_problem("get_compile_backend:", partial(_backend_problem, backend))
    for name in platform.extra_passes(config):
        yield _prefixed_problem("extra_passes:", partial(_pass_problem, name))


def _class_problem(name: str, platform: Platform, member: str, *arguments: Any) -> str | None:
    """Return why *name* is not a class that can replace the one of the engine, or None."""
    part = resolve_obj_by_qualname(name)
    if not isinstance(part, type):
        return f"{name!r} is {part!r}, not a class"
    parts = engine_parts()
    default = object if parts is None else parts.own_part(platform, member, *arguments)
    methods = [method for method, _ in inspect.getmembers(default, callable) if method[0] != "_"]
    missing = [method for method in methods if not callable(getattr(part, method, None))]
    if not missing or issubclass(part, default):
        return None
    default_name = f"{default.__module__}.{default.__qualname__}"
    return f"{name!r} has no {', '.join(missing)}, as {default_name!r} has"


def _backend_problem(name: str) -> str | None:
    backend = resolve_obj_by_qualname(name) if ":" in name else torch_compat.lookup_backend(name)
    return None if callable(backend) else f"{name!r} is {backend!r}, which is not a function"


def _pass_problem(name: str) -> str | None:
    function = resolve_obj_by_qualname(name)
    if not callable(function):
        return f"{name!r} is {function!r}, which is not a function"
    try:
        inspect.signature(function).bind("graph", "context")
    except TypeError as error:
        return f"{name!r} cannot be called with a graph and a context: {error}"
    return None


REFERENCES = PlatformCheck(
    "references",
    "every class that the platform names exists and can replace opweave's",
    _check_references,
)


# Selected implementations compute the op's definition on the platform's device.


_CHECKS = ("values", "mutation")  # `opweave verify --platform` runs all


def kernels(subject: PlatformSubject) -> Iterator[Subject]:
    """Yield the selected implementations that the platform's package brings.

    Those of opweave are left out, except on opweave's own platforms.
    """
    current_registry().ensure_ready()
    platform = subject.platform
    lists = platform.get_default_ir_op_priority()
    is_own = type(platform).__module__.startswith("opweave.")
    for name, op in current_registry().ops.items():
        providers = lists.get(name, lists.get(EVERY_OP))
        for entry in parse(providers, "platform default") if providers else ():
            # The check of the priorities reports missing registrations.
            impl = op.impls.get(entry.provider, op.impls[NATIVE])
            if impl.provider != NATIVE and (is_own or not impl.site.is_in_opweave):
                yield Subject(op, entry.provider, platform.device_type)


def verify_kernel(implementation: Subject, seed: int = 0) -> Result:
    """Verify an implementation as the check ``kernels`` does."""
    return verify(implementation, _CHECKS, seed=seed)


def _check_kernels(subject: PlatformSubject) -> Findings:
    for implementation in kernels(subject):
        yield from _verified(implementation)


def _verified(implementation: Subject) -> Findings:
    result = verify_kernel(implementation)
    problems = [f"{result.subject} {o.check}: {p}" for o in result.outcomes for p in o.problems]
    if problems:
        yield problems[0]
    elif not result.obstacle:
        yield None


KERNELS = PlatformCheck(
    "kernels",
    "each selected implementation of the package matches the op's definition on the device",
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
    environments = [{"OPWEAVE_PLATFORM": subject.claimant}]
    if subject.current:  # children without settings, and the workers of an engine
        environments += [{}, {VARIABLE: resolution().to_json()}]
    for environment, qualname in zip(environments, ask(_CHILDREN_CODE, *environments), strict=True):
        setting = " and ".join(f"{name} is set" for name in environment) or "nothing is set"
        is_same = qualname.replace(":", ".") == subject.qualname
        yield None if is_same else f"a child process where {setting} runs on {qualname}"


CHILDREN = PlatformCheck("children", "child processes run on the same platform", _check_children)


# The checks by name, in the order in which they run.


CHECKS: dict[str, PlatformCheck] = {
    check.name: check
    for check in (
        CONTRACT, CLAIM, CONFIGURATION, DEVICE, CAPABILITIES, SEED, PRIORITIES, REFERENCES,
        KERNELS, CHILDREN,
    )
}  # fmt: skip


# Verification of a platform.


_MAX_PROBLEMS = 5  # reported per check


@dataclass(frozen=True)
class PlatformResult:
    """The result of verifying a platform."""

    subject: PlatformSubject
    outcomes: tuple[Outcome, ...]

    @property
    def status(self) -> str:
        """``passed``, ``failed``, or ``none`` without anything to check."""
        statuses = [outcome.status for outcome in self.outcomes]
        return next((s for s in ("failed", "passed") if s in statuses), "none")

    def raise_if_failed(self) -> None:
        """Raise NonconformingError with every problem, if there is one."""
        raise_if_failed(self.subject, self.outcomes)


def verify_platform(subject: PlatformSubject, checks: Iterable[str] = ()) -> PlatformResult:
    """Run every check, or those named, on a platform.

    Raises:
        UnknownCheckError: a check does not exist.
    """
    chosen = select(CHECKS, checks)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = [outcome_of(c.name, partial(c.run, subject), _MAX_PROBLEMS) for c in chosen]
    return PlatformResult(subject, tuple(outcomes))

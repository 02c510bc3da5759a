"""The contract of a platform: the members that a device family can override."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from opweave import transaction
from opweave.config import EngineConfig
from opweave.config.patches import ConfigPatch
from opweave.config.plugin_options import PluginOptions
from opweave.ir import current_registry
from opweave.ir.errors import OpweaveError
from opweave.platforms import probes
from opweave.plugins import PLATFORM_API, resolve_obj_by_qualname
from opweave.registration import owned_by

# Errors of the platforms.


class PlatformError(OpweaveError):
    """Base class of the errors of :mod:`opweave.platforms`."""


class PlatformContractError(PlatformError, TypeError):
    """A subclass of ``Platform`` violates the contract; the message lists every fault.

    Raised when the class is defined, or at the first use for faults that show only then.
    """


class PlatformApiError(PlatformContractError):
    """A platform is written for another version of the contract than opweave's."""


class PlatformMismatchError(PlatformError, RuntimeError):
    """A child process resolved another platform than its parent."""


class UnsupportedByPlatformError(PlatformError, NotImplementedError):
    """The platform does not support the requested operation."""


# Features of devices, so that code does not have to compare platform names.


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features of a device; each is False unless the platform sets it.

    Attributes:
        bf16: computes in bfloat16 without converting to float32 first, so bfloat16 checkpoints keep
            their dtype.
        fp8: multiplies matrices in ``torch.float8_e4m3fn``.
        int8: multiplies int8 matrices with int32 accumulation.
        streams: has several in-order queues, so copies can overlap kernels.
        graph_capture: records the kernels of a step and replays them without Python.
        pinned_memory: copies asynchronously from page-locked host memory.
        unified_memory: shares its memory with the host. The KV cache then has a fixed size instead
            of a fraction of the free memory.
    """

    bf16: bool = False
    fp8: bool = False
    int8: bool = False
    streams: bool = False
    graph_capture: bool = False
    pinned_memory: bool = False
    unified_memory: bool = False


# Descriptions of attention layers and devices.


class DeviceCapability(NamedTuple):
    """The version of a device's architecture, such as 9.0 for an H100.

    Attributes:
        major: major version.
        minor: minor version.
    """

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """An attention layer, for the choice of an implementation by the platform.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads; divides `num_heads`.
        head_size: size of a query or key head.
        dtype: dtype of queries, keys and values.
        window: size of the sliding window, or None.
        scale: factor of the scores, or None for ``head_size ** -0.5``.
        soft_cap: replace scores by ``soft_cap * tanh(score / soft_cap)``, or None.
        is_latent: multi-head latent attention: the cache has one row of ``head_size`` elements for
            all heads.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    is_latent: bool = False


# Recorded kernel launches of a device, which are replayed without the host code between them.


class GraphRecorder(Protocol):
    """Records what a function launches on a device. One recorder serves a whole model."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats the launches of *run* on the same memory.

        *run* is called at least twice: before the recording, for what kernels do on their first
        call only. Only launches are repeated: what *run* does on the host is not.

        Raises:
            RuntimeError: the device cannot record what *run* does, such as waiting for a result.
        """


class CudaGraphRecorder:
    """Records CUDA graphs, which share one memory pool.

    The memory of a graph's results may be reused by another graph's replay.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record with a stream of its own, as ``torch.cuda.graph`` requires."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        return graph.replay


# Checks of a platform class against the contract of ``Platform``, when the class is defined.
#
# Otherwise a misspelled hook, or one with an incompatible signature, would go unnoticed.


_BOUND = (staticmethod, classmethod)
_COMPUTED = (property, cached_property)


def check_class(cls: type, base: type) -> None:
    """Check the members that *cls* and its mixins define.

    Raises:
        PlatformApiError: (a TypeError) it is written for another version of the contract.
        PlatformContractError: (a TypeError) it breaks the contract; the message lists each fault.
    """
    check_api(cls.__dict__.get("api", base.__dict__["api"]), _name(cls), base.__dict__["api"])
    faults = [
        fault
        for owner in cls.__mro__
        if owner is cls or (not issubclass(owner, base) and owner is not object)
        for name, value in vars(owner).items()
        if not name.startswith("_")
        for fault in _faults(f"{_name(owner)}.{name}", name, value, base)
    ]
    if faults:
        raise PlatformContractError(
            f"{_name(cls)} does not keep the contract of Platform:\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )


def check_api(api: object, who: str, provided: int) -> None:
    """Raise :class:`PlatformApiError` unless *api* is the *provided* version."""
    if isinstance(api, bool) or not isinstance(api, int):
        raise PlatformApiError(f"{who}: api={api!r} should be the number {provided}.")
    if api != provided:
        older, remedy = (
            ("an older", "install a version of the package that is written for this opweave")
            if api < provided
            else ("a newer", "upgrade opweave, or install an older version of the package")
        )
        raise PlatformApiError(
            f"{who} is written for version {api} of the platform contract, {older} one than the "
            f"version {provided} of this opweave: {remedy}."
        )


def check_object(platform: object, base: type, who: str) -> None:
    """Check that *platform* is an instance of *base* with valid attributes.

    Raises:
        PlatformContractError: (a TypeError) it is not.
    """
    if not isinstance(platform, base):
        raise PlatformContractError(
            f"{who} is a {type(platform).__name__}, and not derived from {_name(base)}."
        )
    # Properties are not read, because they may start the device's runtime.
    values = {name: inspect.getattr_static(platform, name, None) for name in base.__annotations__}
    faults = [
        fault
        for name, value in values.items()
        if not isinstance(value, _COMPUTED)
        for fault in _data_faults(f"{_name(type(platform))}.{name}", name, value)
    ]
    if faults:
        raise PlatformContractError("\n".join(faults))


def members(base: type) -> Iterator[str]:
    """Yield the names of the contract in definition order: attributes, then methods."""
    yield from base.__annotations__
    yield from (n for n, v in vars(base).items() if inspect.isfunction(v) and n[0] != "_")


def _faults(where: str, name: str, value: Any, base: type) -> Iterator[str]:
    names = list(members(base))
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        yield (
            f"{where} is not a member of the contract. {hint}Names of helpers must start with _."
        )
    elif name in base.__annotations__:
        if not isinstance(value, _COMPUTED):
            yield from _data_faults(where, name, value)
    else:
        yield from _method_faults(where, value, base.__dict__[name])


def _method_faults(where: str, value: Any, expected: Callable[..., Any]) -> Iterator[str]:
    function = value.__func__ if isinstance(value, _BOUND) else value
    if isinstance(value, (*_COMPUTED, type)) or not callable(function):
        yield f"{where} is {_shown(value)}; it should be a method {_signature(expected)}."
        return
    if inspect.iscoroutinefunction(function):
        yield f"{where} is a coroutine function; it should be a plain method."
        return
    parameters = list(inspect.signature(function).parameters.values())
    actual = parameters if isinstance(value, staticmethod) else parameters[1:]
    if not isinstance(value, staticmethod) and not parameters:
        yield f"{where} takes no self."
        return
    required = list(inspect.signature(expected).parameters.values())[1:]
    problems = [*_missing(actual, required), *_unexpected(actual, required)]
    if problems:
        yield f"{where}{_signature(function)} {'; '.join(problems)}. It is {_signature(expected)}."


def _missing(actual: list[inspect.Parameter], expected: list[inspect.Parameter]) -> Iterator[str]:
    """Describe the expected parameters that are not accepted by position and by name."""
    kinds = {parameter.kind for parameter in actual}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        return
    by_name = {p.name: p for p in actual if p.kind is p.POSITIONAL_OR_KEYWORD}
    places = list(by_name)
    for place, parameter in enumerate(expected):
        match = by_name.get(parameter.name)
        if match is None:
            yield f"does not take {parameter.name!r}"
        elif places[place : place + 1] != [parameter.name]:
            yield f"takes {parameter.name!r} in another position"
        elif parameter.default is not parameter.empty and match.default is match.empty:
            yield f"requires {parameter.name!r}, which is optional"


def _unexpected(
    actual: list[inspect.Parameter], expected: list[inspect.Parameter]
) -> Iterator[str]:
    """Describe the required parameters that are never passed."""
    names = {parameter.name for parameter in expected}
    for parameter in actual:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not variadic and parameter.name not in names and parameter.default is parameter.empty:
            yield f"requires {parameter.name!r}, which is never passed"


def _data_faults(where: str, name: str, value: object) -> Iterator[str]:
    description, is_right = _DATA[name]
    if not is_right(value):
        yield f"{where} is {_shown(value)}; it should be {description}."


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_tuple_of(kind: type) -> Callable[[object], bool]:
    return lambda v: isinstance(v, tuple) and bool(v) and all(isinstance(i, kind) for i in v)


_DATA: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "api": ("the number of the version", lambda v: isinstance(v, int)),
    "name": ("an identifier, such as 'acme'", lambda v: isinstance(v, str) and v.isidentifier()),
    "device_type": ("torch's name for the devices, such as 'cuda'", _is_text),
    "dispatch_tags": ("a tuple of strings, such as ('oot',)", _is_tuple_of(str)),
    "supported_dtypes": ("a tuple of torch.dtype", _is_tuple_of(torch.dtype)),
    "capabilities": ("a Capabilities(...)", lambda v: isinstance(v, Capabilities)),
    "dist_backend": ("the name of a backend of torch.distributed", _is_text),
    "simple_compile_backend": ("the name of a backend of torch.compile", _is_text),
}


def _signature(function: Callable[..., Any]) -> str:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    bare = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    return str(inspect.Signature(bare))


def _shown(value: object) -> str:
    if isinstance(value, (*_COMPUTED, *_BOUND)):
        return f"a {type(value).__name__}"
    if inspect.isfunction(value):
        return "a method"
    return "missing" if value is None else repr(value)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# The contract.


class Platform:
    """A device family: its capabilities, defaults and engine parts.

    A subclass must set `name` and `device_type`, and overrides the members that differ. It is
    checked when it is defined: an unknown public name or an incompatible signature raises a
    :class:`PlatformContractError`. Prefix helpers with ``_``. Each process has one instance, which
    is created without arguments; creating it must not touch a device.

    Methods that return the name of a class (``"acme.worker.AcmeWorker"``) are called when the class
    is needed; it is imported then. None stands for the class of opweave-engine.

    Attributes:
        api: the version of this contract that the class is written for.
        name: the unique name of the platform, such as ``"acme"``.
        device_type: torch's name for the device: ``"cuda"``, or the name that a ``PrivateUse1``
            backend was given.
        dispatch_tags: tags of ``CustomOp`` methods, preferred one first: the first
            ``forward_<tag>`` that the op defines runs.
        supported_dtypes: dtypes that models can run in, the preferred one first.
        capabilities: features of the device.
        dist_backend: the backend of ``torch.distributed`` between its devices.
        simple_compile_backend: the backend of ``torch.compile`` for a single operation.
    """

    api: int = PLATFORM_API
    name: str
    device_type: str
    dispatch_tags: tuple[str, ...] = ("oot",)
    supported_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    capabilities: Capabilities = Capabilities()
    dist_backend: str = "gloo"
    simple_compile_backend: str = "inductor"

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        check_class(cls, Platform)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    # Configuration

    def extend_cli(self, options: PluginOptions) -> None:
        """Declare command-line options: ``options.add("queue_depth", int, 4, "...")``.

        Users set them with ``--plugin.<name>.queue-depth=8``, where *name* is the platform's.
        """

    def config_defaults(self, config: EngineConfig) -> Sequence[ConfigPatch]:
        """Return defaults for this platform, applied before other values are derived from *config*.

        Values that the user set are kept; a patch with ``force`` is refused here.
        """
        return ()

    def check_and_update_config(self, config: EngineConfig) -> Sequence[ConfigPatch]:
        """Check the complete *config* and return the changes that this platform needs.

        Raises:
            OpweaveError: the platform does not support *config*; the message says what it supports.
        """
        return ()

    def validate_request(self, params: Any) -> None:
        """Reject a request that the platform does not support.

        Args:
            params: its :class:`opweave_engine.SamplingParams`.

        Raises:
            OpweaveError: the platform does not support the request.
        """

    # Ops and layers

    def import_kernels(self) -> None:
        """Import the kernels for this platform, which register their implementations.

        Runs once, when an op is first used; if it raises, its registrations are undone. By default
        it loads the kernels that come with opweave; call ``super().import_kernels()`` to keep them.
        """
        # Not owned by a plugin nor part of its transaction: they are imported only once, and must
        # survive a failure of the calling hook.
        with owned_by(None), transaction.detached():
            resolve_obj_by_qualname("opweave.kernels.load")(current_registry())

    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        """Return the default priority list of each op; ops that are not listed use native.

        The key ``"*"`` stands for all ops that are not listed. An op skips the providers in its
        list that have no implementation of it.

        The lists may depend on *config*. Those of opweave's platforms are the same in eager mode
        and under ``torch.compile``.
        """
        return {}

    def default_custom_ops(self, config: EngineConfig) -> Sequence[str]:
        """Return the default of ``custom_ops``: the ``CustomOp`` layers to enable or disable.

        As in ``CompilationConfig.custom_ops``: ``["none", "+rms_norm"]``. An empty list keeps the
        default.
        """
        return ()

    # Parts of the engine

    def get_worker_cls(self, config: EngineConfig) -> str | None:
        """Return the name of the class that owns a device, its memory and its model."""
        return None

    def get_model_runner_cls(self, config: EngineConfig) -> str | None:
        """Return the name of the class that prepares a batch and runs the model on it."""
        return None

    def get_scheduler_cls(self, config: EngineConfig) -> str | None:
        """Return the name of the class that chooses the sequences and tokens of each step."""
        return None

    def get_executor_cls(self, config: EngineConfig) -> str | None:
        """Return the name of the class that starts the workers and communicates with them."""
        return None

    def get_sampler_cls(self, config: EngineConfig) -> str | None:
        """Return the name of the class that samples tokens from the logits."""
        return None

    def get_attn_backend_cls(self, spec: AttentionSpec) -> str | None:
        """Return the name of the class that computes the attention that *spec* describes.

        Raises:
            OpweaveError: the platform has no implementation for it.
        """
        return None

    def get_device_communicator_cls(self) -> str | None:
        """Return the name of the class for collectives between the ranks."""
        return None

    def get_compile_backend(self, config: EngineConfig) -> str:
        """Return the default ``torch.compile`` backend for models.

        The name of a torch backend or of a function (``"acme.compiler:compile"``).
        """
        return config.compilation.backend

    def extra_passes(self, config: EngineConfig | None) -> Sequence[str]:
        """Return the names of compiler passes in the order in which they run.

        They run in the joint stage, just before ops are lowered. Each names a function
        ``(graph, context) -> None``; see :mod:`opweave.compile.plan`.
        """
        return ()

    # Devices

    def get_device_name(self, index: int = 0) -> str:
        """Return the product name of the device."""
        return self.name

    def get_device_capability(self, index: int = 0) -> DeviceCapability | None:
        """Return the version of the device's architecture, or None if it has no version."""
        return None

    def set_device(self, index: int) -> None:
        """Make this device the current one of the process, and start its runtime."""
        self._module().set_device(index)

    def memory_info(self, index: int = 0) -> tuple[int, int]:
        """Return the free and the total memory of a device, in bytes.

        Raises:
            UnsupportedByPlatformError: torch's module for the device lacks ``mem_get_info``, so
                the platform must override this method.
        """
        if self.device_type == "cpu":
            return probes.host_memory()
        mem_get_info = getattr(self._module(), "mem_get_info", None)
        if mem_get_info is None:
            raise UnsupportedByPlatformError(
                f"platform {self.name!r} does not report the memory of its devices: define "
                f"{type(self).__name__}.memory_info(index) -> (free, total), in bytes, or "
                f"torch.{self.device_type}.mem_get_info."
            )
        free, total = mem_get_info(index)
        return free, total

    def graph_recorder(self) -> GraphRecorder | None:
        """Return a new recorder of kernel launches, for decode steps, or None."""
        return None

    def synchronize(self) -> None:
        """Wait until all work on the current device has finished."""
        self._module().synchronize()

    def seed_all(self, seed: int) -> None:
        """Seed every random generator that the platform's kernels use."""
        torch.manual_seed(seed)

    def inference_mode(self) -> AbstractContextManager[Any]:
        """Return the context manager in which models run; it disables gradients."""
        return torch.inference_mode()

    def post_load_model(self, model: nn.Module) -> None:
        """Change a model after its weights are on the device, for example their layout."""

    def doctor(self) -> Mapping[str, object]:
        """Return facts for ``opweave doctor``, such as driver versions and missing libraries."""
        return {}

    def _module(self) -> Any:
        """Return torch's module for the device type: ``torch.cuda``, ``torch.acme``."""
        return torch.get_device_module(self.device_type)

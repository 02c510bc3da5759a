"""What opweave asks of a device family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from opweave.config import EngineConfig
from opweave.config.patches import ConfigPatch
from opweave.config.plugin_options import PluginOptions
from opweave.platforms import contract, defaults, probes
from opweave.platforms.capabilities import Capabilities
from opweave.platforms.errors import UnsupportedByPlatformError
from opweave.platforms.spec import AttentionSpec, DeviceCapability
from opweave.plugins import PLATFORM_API


class Platform:
    """A device family: what it can do, and which parts of opweave it brings its own of.

    A subclass overrides what differs; `name` and `device_type` it must set. It is checked when it
    is defined: a public name that is not below, or a method that cannot be called as below, is a
    :class:`PlatformContractError` there and then. Helpers start with ``_``. There is one object of
    the class in a process; it is built without arguments, and building it touches no device.

    Methods that return the name of a class (``"acme.worker.AcmeWorker"``) are asked when the class
    is needed, and the class is imported then.

    Attributes:
        api: the version of this contract that the class is written for.
        name: what users call the platform: ``"acme"``. A plugin's platform has a name of its own.
        device_type: torch's name for its devices: ``"cuda"``, or what a ``PrivateUse1`` backend is
            renamed to.
        dispatch_tags: which methods of a ``CustomOp`` are the platform's, best first: the first
            ``forward_<tag>`` that the op defines runs.
        supported_dtypes: what a model can be computed in, the preferred one first.
        capabilities: what the device can do.
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
        contract.check_class(cls, Platform)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    # Configuration

    def extend_cli(self, options: PluginOptions) -> None:
        """Declare options of the command line: ``options.add("queue_depth", int, 4, "...")``.

        The user gives them as ``--plugin.<name>.queue-depth=8``, where *name* is the platform's.
        """

    def config_defaults(self, config: EngineConfig) -> Sequence[ConfigPatch]:
        """Return better defaults for this platform, before anything is derived from *config*.

        What the user gave stays; a patch with ``force`` is refused here.
        """
        return ()

    def check_and_update_config(self, config: EngineConfig) -> Sequence[ConfigPatch]:
        """Check the finished *config*, and return what must be different on this platform.

        Raises:
            OpweaveError: the platform cannot run what *config* asks for; the message says what it
                can.
        """
        return ()

    def validate_request(self, params: Any) -> None:
        """Refuse a request that the platform cannot serve.

        Args:
            params: its :class:`opweave.engine.SamplingParams`.

        Raises:
            OpweaveError: it asks for what the platform cannot do.
        """

    # Ops and layers

    def import_kernels(self) -> None:
        """Import the kernels for this platform, which register their implementations.

        Runs once, when an op is first used; if it raises, what it registered is undone. By default
        it loads the kernels that come with opweave; call ``super().import_kernels()`` to keep them.
        """
        defaults.import_kernels()

    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        """Return the default priority list of each op; ops left out get native.

        A platform may choose by *config*. The lists that opweave ships are the same in
        eager mode and under ``torch.compile``.
        """
        return {}

    def default_custom_ops(self, config: EngineConfig) -> Sequence[str]:
        """Return which ops of ``CustomOp`` to enable or disable, where the user does not say.

        As in ``CompilationConfig.custom_ops``: ``["none", "+rms_norm"]``. An empty list leaves the
        default.
        """
        return ()

    # Parts of the engine

    def get_worker_cls(self, config: EngineConfig) -> str:
        """Return the name of the class that owns a device, its memory and its model."""
        return defaults.WORKER

    def get_model_runner_cls(self, config: EngineConfig) -> str:
        """Return the name of the class that turns a batch into the model's inputs, and runs it."""
        return defaults.MODEL_RUNNER

    def get_scheduler_cls(self, config: EngineConfig) -> str:
        """Return the name of the class that chooses what each step computes."""
        return defaults.SCHEDULER

    def get_executor_cls(self, config: EngineConfig) -> str:
        """Return the name of the class that starts the workers and speaks to them."""
        is_alone = config.parallel.tensor_parallel_size == 1
        return defaults.EXECUTOR if is_alone else defaults.RANKED_EXECUTOR

    def get_sampler_cls(self, config: EngineConfig) -> str:
        """Return the name of the class that chooses tokens from the model's scores."""
        return defaults.SAMPLER

    def get_attn_backend_cls(self, spec: AttentionSpec) -> str:
        """Return the name of the class that computes the attention that *spec* describes.

        Raises:
            OpweaveError: the platform has no implementation for it.
        """
        return defaults.LATENT_ATTENTION if spec.is_latent else defaults.ATTENTION

    def get_device_communicator_cls(self) -> str:
        """Return the name of the class that moves tensors between the ranks."""
        return defaults.COMMUNICATOR

    def get_compile_backend(self, config: EngineConfig) -> str:
        """Return the backend of ``torch.compile`` for a model, where the user names none.

        Any that torch knows, or the name of a function (``"acme.compiler:compile"``).
        """
        return config.compilation.backend

    def extra_passes(self, config: EngineConfig | None) -> Sequence[str]:
        """Return the names of compiler passes, in the order in which they run.

        That is in the joint stage, just before ops are lowered. Each names a function
        ``(graph, context) -> None``: :mod:`opweave.compile.plugin_passes` says what it may do.
        """
        return ()

    # Devices

    def get_device_name(self, index: int = 0) -> str:
        """Return what the vendor calls the device of that index."""
        return self.name

    def get_device_capability(self, index: int = 0) -> DeviceCapability | None:
        """Return the version of the device's architecture; None where there is no such number."""
        return None

    def set_device(self, index: int) -> None:
        """Make the device of that index this process's own, and start its runtime."""
        self._module().set_device(index)

    def memory_info(self, index: int = 0) -> tuple[int, int]:
        """Return the free and the total memory of a device, in bytes.

        Raises:
            UnsupportedByPlatformError: torch's module for the device cannot tell, so that the
                platform must.
        """
        if self.device_type == "cpu":
            return probes.host_memory()
        ask = getattr(self._module(), "mem_get_info", None)
        if ask is None:
            raise UnsupportedByPlatformError(
                f"platform {self.name!r} does not say how much memory its devices have: "
                f"{type(self).__name__} should define memory_info(index) -> (free, total), in "
                f"bytes, or torch.{self.device_type} have mem_get_info."
            )
        free, total = ask(index)
        return free, total

    def synchronize(self) -> None:
        """Wait until the current device has done all it was given."""
        self._module().synchronize()

    def seed_all(self, seed: int) -> None:
        """Seed every generator that the platform's kernels may draw from."""
        torch.manual_seed(seed)

    def inference_mode(self) -> AbstractContextManager[Any]:
        """Return the context in which models run: no gradients are recorded in it."""
        return torch.inference_mode()

    def post_load_model(self, model: nn.Module) -> None:
        """Change a model whose weights are loaded and on the device, such as their layout."""

    def doctor(self) -> Mapping[str, object]:
        """Return facts for ``opweave doctor``: versions of drivers, what is missing."""
        return {}

    def _module(self) -> Any:
        """Return torch's module for the device type: ``torch.cuda``, ``torch.acme``."""
        return torch.get_device_module(self.device_type)

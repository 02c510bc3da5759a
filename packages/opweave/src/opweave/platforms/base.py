"""The contract of a platform: the members that a device family can override."""

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
from opweave.platforms.graphs import GraphRecorder
from opweave.platforms.spec import AttentionSpec, DeviceCapability
from opweave.plugins import PLATFORM_API


class Platform:
    """A device family: its capabilities, defaults and engine parts.

    A subclass must set `name` and `device_type`, and overrides the members that differ. It is
    checked when it is defined: an unknown public name or an incompatible signature raises a
    :class:`PlatformContractError`. Prefix helpers with ``_``. Each process has one instance, which
    is created without arguments; creating it must not touch a device.

    Methods that return the name of a class (``"acme.worker.AcmeWorker"``) are called when the class
    is needed; it is imported then.

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
        contract.check_class(cls, Platform)

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
        defaults.import_kernels()

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

    def get_worker_cls(self, config: EngineConfig) -> str:
        """Return the name of the class that owns a device, its memory and its model."""
        return defaults.WORKER

    def get_model_runner_cls(self, config: EngineConfig) -> str:
        """Return the name of the class that prepares a batch and runs the model on it."""
        return defaults.MODEL_RUNNER

    def get_scheduler_cls(self, config: EngineConfig) -> str:
        """Return the name of the class that chooses the sequences and tokens of each step."""
        return defaults.SCHEDULER

    def get_executor_cls(self, config: EngineConfig) -> str:
        """Return the name of the class that starts the workers and communicates with them."""
        is_alone = config.parallel.tensor_parallel_size == 1
        return defaults.EXECUTOR if is_alone else defaults.RANKED_EXECUTOR

    def get_sampler_cls(self, config: EngineConfig) -> str:
        """Return the name of the class that samples tokens from the logits."""
        return defaults.SAMPLER

    def get_attn_backend_cls(self, spec: AttentionSpec) -> str:
        """Return the name of the class that computes the attention that *spec* describes.

        Raises:
            OpweaveError: the platform has no implementation for it.
        """
        return defaults.LATENT_ATTENTION if spec.is_latent else defaults.ATTENTION

    def get_device_communicator_cls(self) -> str:
        """Return the name of the class for collectives between the ranks."""
        return defaults.COMMUNICATOR

    def get_compile_backend(self, config: EngineConfig) -> str:
        """Return the default ``torch.compile`` backend for models.

        The name of a torch backend or of a function (``"acme.compiler:compile"``).
        """
        return config.compilation.backend

    def extra_passes(self, config: EngineConfig | None) -> Sequence[str]:
        """Return the names of compiler passes in the order in which they run.

        They run in the joint stage, just before ops are lowered. Each names a function
        ``(graph, context) -> None``; see :mod:`opweave.compile.plugin_passes`.
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
        ask = getattr(self._module(), "mem_get_info", None)
        if ask is None:
            raise UnsupportedByPlatformError(
                f"platform {self.name!r} does not report the memory of its devices: define "
                f"{type(self).__name__}.memory_info(index) -> (free, total), in bytes, or "
                f"torch.{self.device_type}.mem_get_info."
            )
        free, total = ask(index)
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

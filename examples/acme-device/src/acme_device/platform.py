"""The platform: what opweave asks of a device, and what acme answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

import torch
from torch import nn

import acme_device
from acme_device import settings
from acme_device.layers import AcmeRowParallelLinear
from opweave.config import EngineConfig
from opweave.config.patches import ConfigPatch
from opweave.config.plugin_options import PluginOptions
from opweave.platforms import AttentionSpec, Capabilities, DeviceCapability, Platform


class AcmePlatform(Platform):
    """Acme One. Building it touches no device; :meth:`set_device` loads the driver."""

    name = "acme"
    device_type = "acme"
    # Layers that acme does not replace run the methods that call the ops, which have its kernels.
    dispatch_tags = ("oot", "cuda")
    supported_dtypes = (torch.bfloat16, torch.float16, torch.float32)
    capabilities = Capabilities(unified_memory=True)

    def extend_cli(self, options: PluginOptions) -> None:
        settings.declare_options(options)

    def config_defaults(self, config: EngineConfig) -> Sequence[ConfigPatch]:
        return [
            ConfigPatch("cache.block_size", 32, "a block of keys fits the device's local memory")
        ]

    def check_and_update_config(self, config: EngineConfig) -> Sequence[ConfigPatch]:
        acme_device.init()
        ranks, devices = config.parallel.tensor_parallel_size, torch.acme.device_count()
        if ranks > devices:
            raise acme_device.AcmeError(
                f"tensor_parallel_size={ranks} needs as many acme devices; there are {devices}. "
                f"ACME_DEVICES={ranks} makes more."
            )
        return ()

    def import_kernels(self) -> None:
        super().import_kernels()
        acme_device.init()
        import_module("acme_device.kernels")

    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        return {op: ["acme"] for op in _OPS}

    def extra_passes(self, config: EngineConfig | None) -> Sequence[str]:
        return ("acme_device.passes:scale_residuals",)

    def get_worker_cls(self, config: EngineConfig) -> str:
        return "acme_device.engine.worker.AcmeWorker"

    def get_model_runner_cls(self, config: EngineConfig) -> str:
        return "acme_device.engine.model_runner.AcmeModelRunner"

    def get_scheduler_cls(self, config: EngineConfig) -> str:
        return "acme_device.engine.scheduler.AcmeScheduler"

    def get_sampler_cls(self, config: EngineConfig) -> str:
        return "acme_device.engine.sampler.AcmeSampler"

    def get_attn_backend_cls(self, spec: AttentionSpec) -> str | None:
        if spec.is_latent:  # there is no kernel for it: opweave's own
            return None
        return "acme_device.engine.attention.AcmeAttention"

    def get_device_communicator_cls(self) -> str:
        return "acme_device.engine.communicator.AcmeCommunicator"

    def set_device(self, index: int) -> None:
        acme_device.init()
        torch.ops.acme.set_memory_limit(settings.memory_bytes())
        torch.acme.set_device(index)

    def memory_info(self, index: int = 0) -> tuple[int, int]:
        acme_device.init()
        return torch.acme.mem_get_info(index)

    def get_device_name(self, index: int = 0) -> str:
        return "Acme One"

    def get_device_capability(self, index: int = 0) -> DeviceCapability:
        return DeviceCapability(1, 0)

    def post_load_model(self, model: nn.Module) -> None:
        if settings.tiled_weights():
            for layer in model.modules():
                if isinstance(layer, AcmeRowParallelLinear):
                    layer.tile()

    def doctor(self) -> Mapping[str, object]:
        acme_device.init()
        free, total = self.memory_info()
        return {
            "devices": torch.acme.device_count(),
            "memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
            "ran on the host": [f"{name} ({n}x)" for name, n in acme_device.fallbacks().items()],
        }


# Registered by acme_device.kernels.
_OPS = (
    "acme_scaled_residual",
    "acme_tiled_linear",
    "bidirectional_attention",
    "causal_attention",
    "embedding",
    "fused_add_rms_norm",
    "linear",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "varlen_attention",
)

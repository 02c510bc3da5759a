"""``current_platform`` with vLLM's methods."""

from collections.abc import Callable
from typing import Any

import torch

from opweave import platforms
from opweave.platforms import resolve_current_platform_cls_qualname
from opweave.plugins import BUILTIN_PLATFORMS

__all__ = ["CurrentPlatform", "current_platform", "resolve_current_platform_cls_qualname"]


_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "xla": "XLA"}


def _is_one_of(*names: str) -> Callable[[Any], bool]:
    """Return a method that tells whether the current platform has one of these names."""
    return lambda _: platforms.current_platform.name in names


class CurrentPlatform:
    """opweave's current platform with vLLM's methods; resolved on first use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(platforms.current_platform, name)

    def __repr__(self) -> str:
        return repr(platforms.current_platform)

    is_cuda = _is_one_of("cuda")
    is_rocm = _is_one_of("rocm")
    is_cuda_alike = _is_one_of("cuda", "rocm")
    is_cpu = _is_one_of("cpu")
    is_xpu = _is_one_of("xpu")
    is_tpu = _is_one_of("tpu")

    def is_out_of_tree(self) -> bool:
        """Whether a plugin provides the platform."""
        return platforms.current_platform.name not in BUILTIN_PLATFORMS

    @property
    def device_name(self) -> str:
        """The short name of the platform."""
        return platforms.current_platform.name

    def has_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether the device's architecture is at least this version, ``(9, 0)`` or 90."""
        device = platforms.current_platform.get_device_capability(device_id)
        minimum = divmod(capability, 10) if isinstance(capability, int) else capability
        return device is not None and tuple(device) >= tuple(minimum)

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Return the total memory of a device in bytes."""
        return platforms.current_platform.memory_info(device_id)[1]

    def supports_fp8(self) -> bool:
        """Whether the device supports float8 matrix products."""
        return platforms.current_platform.capabilities.fp8

    def is_fp8_fnuz(self) -> bool:
        """Whether the device computes in float8_e4m3fnuz, as gfx94 does."""
        properties = torch.cuda.get_device_properties(0) if self.is_rocm() else None
        return str(getattr(properties, "gcnArchName", "")).startswith("gfx94")

    def fp8_dtype(self) -> torch.dtype:
        """Return the float8 dtype in which the device computes."""
        return torch.float8_e4m3fnuz if self.is_fp8_fnuz() else torch.float8_e4m3fn

    @property
    def dispatch_key(self) -> str:
        """The dispatch key of torch for kernels of the device."""
        return _DISPATCH_KEYS.get(platforms.current_platform.device_type, "PrivateUse1")

    def num_compute_units(self, device_id: int = 0) -> int:
        """Return the number of multiprocessors of a GPU, else of the process's threads."""
        if self.is_cuda_alike():
            return int(torch.cuda.get_device_properties(device_id).multi_processor_count)
        return torch.get_num_threads()

    def opaque_attention_op(self) -> bool:
        """Whether attention is a single op in graphs: opweave's always is."""
        return True

    def is_pin_memory_available(self) -> bool:
        """Whether copies from page-locked memory are asynchronous."""
        return platforms.current_platform.capabilities.pinned_memory

    def manual_seed_all(self, seed: int) -> None:
        """Seed every random number generator of the platform."""
        platforms.current_platform.seed_all(seed)


current_platform = CurrentPlatform()

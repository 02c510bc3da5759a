"""``current_platform`` with vLLM's methods."""

from __future__ import annotations

from typing import Any

import torch

from opweave import platforms
from opweave.platforms import resolve_current_platform_cls_qualname
from opweave.plugins import BUILTIN_PLATFORMS

__all__ = ["CurrentPlatform", "current_platform", "resolve_current_platform_cls_qualname"]


_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "xla": "XLA"}


class CurrentPlatform:
    """opweave's current platform with vLLM's methods; resolved on first use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(platforms.current_platform, name)

    def __repr__(self) -> str:
        return repr(platforms.current_platform)

    def is_cuda(self) -> bool:
        """Whether this is an NVIDIA GPU."""
        return self._is("cuda")

    def is_rocm(self) -> bool:
        """Whether this is an AMD GPU."""
        return self._is("rocm")

    def is_cuda_alike(self) -> bool:
        """Whether this is an NVIDIA or AMD GPU."""
        return self._is("cuda", "rocm")

    def is_cpu(self) -> bool:
        """Whether this is the CPU."""
        return self._is("cpu")

    def is_xpu(self) -> bool:
        """Whether this is an Intel GPU."""
        return self._is("xpu")

    def is_tpu(self) -> bool:
        """Whether this is a Google TPU."""
        return self._is("tpu")

    def is_out_of_tree(self) -> bool:
        """Whether a plugin provides the platform."""
        return platforms.current_platform.name not in BUILTIN_PLATFORMS

    @property
    def device_name(self) -> str:
        """The short name of the platform."""
        return platforms.current_platform.name

    def has_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether the device's architecture is at least this version, ``(9, 0)`` or 90."""
        found = platforms.current_platform.get_device_capability(device_id)
        asked = divmod(capability, 10) if isinstance(capability, int) else capability
        return found is not None and tuple(found) >= tuple(asked)

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

    def _is(self, *names: str) -> bool:
        return platforms.current_platform.name in names


current_platform = CurrentPlatform()

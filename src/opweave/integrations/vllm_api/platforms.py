"""``current_platform`` with vLLM's methods."""

from __future__ import annotations

from typing import Any

from opweave import platforms
from opweave.platforms import resolve_current_platform_cls_qualname
from opweave.plugins import BUILTIN_PLATFORMS

__all__ = ["CurrentPlatform", "current_platform", "resolve_current_platform_cls_qualname"]


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

    def is_pin_memory_available(self) -> bool:
        """Whether copies from page-locked memory are asynchronous."""
        return platforms.current_platform.capabilities.pinned_memory

    def manual_seed_all(self, seed: int) -> None:
        """Seed every random number generator of the platform."""
        platforms.current_platform.seed_all(seed)

    def _is(self, *names: str) -> bool:
        return platforms.current_platform.name in names


current_platform = CurrentPlatform()

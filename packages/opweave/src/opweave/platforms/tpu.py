"""Google TPUs, through PyTorch/XLA."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from opweave.config import EngineConfig
from opweave.platforms import probes
from opweave.platforms.base import Platform
from opweave.platforms.capabilities import Capabilities


class TpuPlatform(Platform):
    """TPUs, ``xla`` devices in torch; needs ``torch_xla``."""

    name = "tpu"
    device_type = "xla"
    dispatch_tags = ("tpu",)
    supported_dtypes = (torch.bfloat16, torch.float32)
    capabilities = Capabilities(bf16=True, int8=True)
    dist_backend = "xla"
    simple_compile_backend = "openxla"

    def get_compile_backend(self, config: EngineConfig) -> str:
        return "openxla"

    def get_device_name(self, index: int = 0) -> str:
        return str(_xla().core.xla_model.xla_device_hw(f"xla:{index}"))

    def set_device(self, index: int) -> None:
        """No-op: the runtime assigns devices to processes."""

    def memory_info(self, index: int = 0) -> tuple[int, int]:
        found = _xla().core.xla_model.get_memory_info(f"xla:{index}")
        return found["bytes_limit"] - found["bytes_used"], found["bytes_limit"]

    def synchronize(self) -> None:
        _xla().sync(wait=True)

    def doctor(self) -> Mapping[str, object]:
        try:
            installed = version("torch_xla")
        except PackageNotFoundError:
            installed = None
        return {"torch_xla": installed, "devices": probes.tpu_devices()}


def _xla() -> Any:
    import_module("torch_xla.core.xla_model")
    return import_module("torch_xla")

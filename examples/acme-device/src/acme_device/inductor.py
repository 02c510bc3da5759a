"""Inductor for acme: ``torch.compile`` generates code for the device.

The device's memory is the host's, so Inductor's C++ generator will do, with one difference where a
kernel is called. torch asks ``torch.acme`` for these classes when it first compiles for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device
from torch._inductor.codegen import common, wrapper
from torch._inductor.codegen.cpp import CppScheduling as Scheduling
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu as CppWrapperCodegen
from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen

__all__ = ["CppWrapperCodegen", "PythonWrapperCodegen", "Scheduling", "WrapperFxCodegen"]

_HOST = torch.device("cpu")


class PythonWrapperCodegen(wrapper.PythonWrapperCodegen):
    """Calls kernels for acme as those for the host are called: with pointers, and no stream."""

    @staticmethod
    def create(is_subgraph: bool, *arguments: Any) -> wrapper.PythonWrapperCodegen:
        if is_subgraph:
            return wrapper.PythonWrapperCodegen.create(is_subgraph, *arguments)
        return PythonWrapperCodegen()

    def _generate_kernel_call_helper(
        self, kernel_name: str, call_args: Any, *, device: Any = None, **options: Any
    ) -> None:
        super()._generate_kernel_call_helper(kernel_name, call_args, device=_HOST, **options)


class Properties(NamedTuple):
    """Hardware properties for the compiler."""

    multi_processor_count: int = 1


class AcmeInterface(DeviceInterface):
    """Inductor's interface to the device."""

    device = torch.acme.device
    current_device = staticmethod(torch.acme.current_device)
    set_device = staticmethod(torch.acme.set_device)
    device_count = staticmethod(torch.acme.device_count)
    is_available = staticmethod(torch.acme.is_available)
    synchronize = staticmethod(torch.acme.synchronize)
    memory_allocated = staticmethod(torch.acme.memory_allocated)

    class Worker:
        """The interface for compile workers, which have no device."""

        @staticmethod
        def set_device(device: int) -> None:
            pass

        @staticmethod
        def current_device() -> int:
            return 0

        @staticmethod
        def get_device_properties(device: Any = None) -> Properties:
            return Properties()

    @staticmethod
    def get_compute_capability(device: Any = None) -> str:
        return ""

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        return True

    @staticmethod
    def is_triton_capable(device: Any = None) -> bool:
        return False

    @staticmethod
    def get_raw_stream(device_idx: int) -> int:
        return 0


register_interface_for_device("acme", AcmeInterface)
common.register_device_op_overrides("acme", CpuDeviceOpOverrides())

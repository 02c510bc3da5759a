"""The built-in platforms, and the conditions under which they claim the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import torch

from opweave.config import EngineConfig
from opweave.ir.priority import EVERY_OP
from opweave.packages import installed_version, is_installed
from opweave.platforms import base, probes
from opweave.plugins import PLATFORM_API, Claim

# The CPU platform.


# Ops for which a fused torch operator is the first choice.
_CPU_TORCH_OPS = (
    "bidirectional_attention", "causal_attention", "causal_conv1d", "causal_conv1d_update",
    "fused_experts", "fused_experts_quant", "selective_scan", "selective_state_update",
    "ssd_chunk_scan", "varlen_attention",
)  # fmt: skip


class CpuPlatform(base.Platform):
    """The CPU."""

    name = "cpu"
    device_type = "cpu"
    dispatch_tags = ("cpu",)
    supported_dtypes = (torch.bfloat16, torch.float16, torch.float32)

    @cached_property
    def capabilities(self) -> base.Capabilities:  # type: ignore[override]
        found = probes.cpu_features()
        return base.Capabilities(
            bf16=bool(found & {"avx512_bf16", "amx_bf16", "bf16"}),
            int8=bool(found & {"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"}),
            unified_memory=True,
        )

    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        # The second is for batch-invariant runs: linear layers of the first choose kernels by
        # batch size.
        providers = ["opweave_c", "opweave_c_invariant"]
        # Users of GGUF files know the rounding of llama.cpp.
        rounded = {"linear_q": ["opweave_c_int8", *providers]}
        return {EVERY_OP: providers, **rounded, **{op: ["aten"] for op in _CPU_TORCH_OPS}}

    def get_device_name(self, index: int = 0) -> str:
        return probes.cpu_name()

    def set_device(self, index: int) -> None:
        """No-op: there is a single device."""

    def synchronize(self) -> None:
        """No-op: the CPU is synchronous."""

    def doctor(self) -> Mapping[str, object]:
        return {"threads": torch.get_num_threads(), "features": sorted(probes.cpu_features())}


# NVIDIA and AMD GPUs, both ``cuda`` devices in torch.


# Ops for which a fused torch operator is the first choice.
_CUDA_TORCH_OPS = (
    "bidirectional_attention", "causal_attention", "fused_add_rms_norm", "rms_norm",
    "varlen_attention",
)  # fmt: skip

# The torch operators for these copy the cache, widen whole weights, or launch a dozen small
# kernels.
_TRITON_OPS = (
    "advance_step_flashattn", "linear_q", "linear_w4a16", "linear_w8a8", "reshape_and_cache",
)  # fmt: skip

# Libraries of attention over the paged cache; without one, ``aten`` computes long prompts with
# torch's attention, and leaves other sequences to Triton.
_PAGED_LIBRARIES = ("flashinfer", "flash_attn")

_INSTINCT = ("gfx908", "gfx90a", "gfx94", "gfx95")  # AMD Instinct, from MI100 on


def _gpu_capabilities(properties: Any, **dtypes: bool) -> base.Capabilities:
    """Return the features of a GPU: those that all have, and those for *dtypes*."""
    return base.Capabilities(
        streams=True,
        graph_capture=True,
        pinned_memory=True,
        unified_memory=bool(getattr(properties, "is_integrated", False)),  # Jetson, GB10, APU
        **dtypes,
    )


class _Gpu(base.Platform):
    device_type = "cuda"
    supported_dtypes = (torch.bfloat16, torch.float16, torch.float32)
    dist_backend = "nccl"  # RCCL in torch for ROCm

    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> dict[str, list[str]]:
        own = {op: ["aten"] for op in _CUDA_TORCH_OPS} | {op: ["triton"] for op in _TRITON_OPS}
        libraries = [*filter(is_installed, _PAGED_LIBRARIES)]
        if "flashinfer" in libraries:
            own["mla_attention_decode"] = ["flashinfer"]
        return own | {"paged_attention": [*libraries, "aten", "triton"]}

    def graph_recorder(self) -> base.GraphRecorder | None:
        return base.CudaGraphRecorder()

    def get_device_name(self, index: int = 0) -> str:
        return str(probes.properties("cuda", index).name)

    def get_device_capability(self, index: int = 0) -> base.DeviceCapability | None:
        properties = probes.properties("cuda", index)
        return base.DeviceCapability(properties.major, properties.minor)


class CudaPlatform(_Gpu):
    """NVIDIA GPUs."""

    name = "cuda"
    dispatch_tags = ("cuda",)

    @cached_property
    def capabilities(self) -> base.Capabilities:  # type: ignore[override]
        # Tensor cores support int8 from 7.5 on, bfloat16 from 8.0, float8 from 8.9: CUDA C++
        # Programming Guide, "Compute Capabilities".
        properties = probes.properties("cuda", 0)
        version = (properties.major, properties.minor)
        return _gpu_capabilities(
            properties, bf16=version >= (8, 0), fp8=version >= (8, 9), int8=version >= (7, 5)
        )

    def doctor(self) -> Mapping[str, object]:
        return {"cuda": torch.version.cuda, "devices": probes.cuda_devices()}


class RocmPlatform(_Gpu):
    """AMD GPUs. Not tested on hardware; kernels are compiled for gfx942 in tests."""

    name = "rocm"
    dispatch_tags = ("hip", "cuda")

    @cached_property
    def capabilities(self) -> base.Capabilities:  # type: ignore[override]
        # gfx950 and gfx12 support float8_e4m3fn; gfx942 supports float8_e4m3fnuz, a different
        # format. AMD, "Data types and precision support".
        properties = probes.properties("cuda", 0)
        architecture = str(getattr(properties, "gcnArchName", "")).split(":")[0]
        has_matrix_units = architecture.startswith((*_INSTINCT, "gfx11", "gfx12"))
        has_fp8 = architecture.startswith(("gfx95", "gfx12"))
        return _gpu_capabilities(
            properties, bf16=has_matrix_units, fp8=has_fp8, int8=has_matrix_units
        )

    def doctor(self) -> Mapping[str, object]:
        return {"hip": torch.version.hip, "devices": probes.rocm_devices()}


# Google TPUs, through PyTorch/XLA.


class TpuPlatform(base.Platform):
    """TPUs, ``xla`` devices in torch; needs ``torch_xla``."""

    name = "tpu"
    device_type = "xla"
    dispatch_tags = ("tpu",)
    supported_dtypes = (torch.bfloat16, torch.float32)
    capabilities = base.Capabilities(bf16=True, int8=True)
    dist_backend = "xla"
    simple_compile_backend = "openxla"

    def get_compile_backend(self, config: EngineConfig) -> str:
        return "openxla"

    def get_device_name(self, index: int = 0) -> str:
        return str(_xla().core.xla_model.xla_device_hw(f"xla:{index}"))

    def set_device(self, index: int) -> None:
        """No-op: the runtime assigns devices to processes."""

    def memory_info(self, index: int = 0) -> tuple[int, int]:
        memory = _xla().core.xla_model.get_memory_info(f"xla:{index}")
        return memory["bytes_limit"] - memory["bytes_used"], memory["bytes_limit"]

    def synchronize(self) -> None:
        _xla().sync(wait=True)

    def doctor(self) -> Mapping[str, object]:
        return {"torch_xla": installed_version("torch_xla"), "devices": probes.tpu_devices()}


def _xla() -> Any:
    import_module("torch_xla.core.xla_model")
    return import_module("torch_xla")


# Intel GPUs.


class XpuPlatform(base.Platform):
    """Intel GPUs, ``xpu`` devices in torch. Not tested on hardware; all ops use native."""

    name = "xpu"
    device_type = "xpu"
    dispatch_tags = ("xpu",)
    supported_dtypes = (torch.bfloat16, torch.float16, torch.float32)
    dist_backend = "xccl"

    @cached_property
    def capabilities(self) -> base.Capabilities:  # type: ignore[override]
        properties = probes.properties("xpu", 0)
        matrix = bool(getattr(properties, "has_subgroup_matrix_multiply_accumulate", False))
        return base.Capabilities(
            bf16=matrix,
            int8=matrix,
            streams=True,
            pinned_memory=True,
            unified_memory=bool(getattr(properties, "is_integrated_gpu", False)),  # torch 2.13
        )

    def get_device_name(self, index: int = 0) -> str:
        return str(probes.properties("xpu", index).name)

    def doctor(self) -> Mapping[str, object]:
        return {"xpu": torch.version.xpu, "devices": probes.xpu_devices()}


# Claims of the built-in platforms.


def cpu() -> Claim:
    """Claim any machine, with the lowest score."""
    return Claim(f"{__name__}.CpuPlatform", PLATFORM_API, 0, "every machine has it")


def _accelerator(name: str, cls: str, kind: str) -> Claim | None:
    if not (count := getattr(probes, f"{name}_devices")()):
        return None
    why = f"torch finds {count} {kind}{'s' * (count > 1)}"
    return Claim(f"{__name__}.{cls}", PLATFORM_API, 50, why)


cuda = partial(_accelerator, "cuda", "CudaPlatform", "NVIDIA GPU")
rocm = partial(_accelerator, "rocm", "RocmPlatform", "AMD GPU")
tpu = partial(_accelerator, "tpu", "TpuPlatform", "TPU")
xpu = partial(_accelerator, "xpu", "XpuPlatform", "Intel GPU")

BUILTIN: Mapping[str, Callable[[], Claim | None]] = {
    "cpu": cpu,
    "cuda": cuda,
    "rocm": rocm,
    "tpu": tpu,
    "xpu": xpu,
}
"""Functions that return the claim of a platform, or None if the machine lacks its device."""

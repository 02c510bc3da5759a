"""Features of devices, so that code does not have to compare platform names."""

from __future__ import annotations

from dataclasses import dataclass


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

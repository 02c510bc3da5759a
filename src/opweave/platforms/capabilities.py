"""What a device can do, as plain facts instead of questions about its name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a device can do. A capability that a platform does not name is absent.

    Attributes:
        bf16: computes in bfloat16 without converting to float32 first, so that a checkpoint in
            bfloat16 should stay in it.
        fp8: multiplies matrices in ``torch.float8_e4m3fn``.
        int8: multiplies matrices in int8, with sums in int32.
        streams: runs work in order on more than one queue, so that copies can overlap kernels.
        graph_capture: can record the kernels of a step and run them again without Python.
        pinned_memory: copies from page-locked host memory without waiting.
        unified_memory: the device's memory is the host's. What is free is then not the engine's
            alone, and the cache takes a fixed size instead of a share of it.
    """

    bf16: bool = False
    fp8: bool = False
    int8: bool = False
    streams: bool = False
    graph_capture: bool = False
    pinned_memory: bool = False
    unified_memory: bool = False

"""The device has the capabilities that the platform declares."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from opweave.conformance.check import Findings, raised
from opweave.conformance.compat import int8_product
from opweave.conformance.platform.check import PlatformCheck
from opweave.conformance.platform.subject import PlatformSubject
from opweave.ir.tolerance import DEFAULT_TOLERANCES
from opweave.platforms import Platform

_SIZE = 32  # a multiple of what matrix units ask for


def _run(subject: PlatformSubject) -> Findings:
    platform = subject.platform
    for dtype in platform.supported_dtypes:
        yield _said(f"{dtype} is in supported_dtypes", partial(_matmul, dtype=dtype), platform)
    for name, show in SHOWN.items():
        if getattr(platform.capabilities, name):
            yield _said(f"the capability {name} is claimed", show, platform)


def _said(claim: str, show: Callable[[Platform], str | None], platform: Platform) -> str | None:
    try:
        problem = show(platform)
    except Exception as error:
        problem = raised(error)
    return f"{claim}, but {problem}" if problem else None


def _matmul(platform: Platform, dtype: torch.dtype) -> str | None:
    a, b = (torch.randint(-4, 5, (_SIZE, _SIZE)).to(dtype) for _ in range(2))
    found = (a.to(platform.device_type) @ b.to(platform.device_type)).cpu()
    return _compared(found.double(), a.double() @ b.double(), dtype, f"a product in {dtype}")


def _bf16(platform: Platform) -> str | None:
    if torch.bfloat16 not in platform.supported_dtypes:
        return "torch.bfloat16 is not in supported_dtypes"
    return _matmul(platform, torch.bfloat16)


def _fp8(platform: Platform) -> str | None:
    a, b = (torch.randint(-4, 5, (_SIZE, _SIZE)).float() for _ in range(2))
    there = [t.to(torch.float8_e4m3fn).to(platform.device_type) for t in (a, b.t().contiguous())]
    one = torch.ones((), device=platform.device_type)
    found = functional.scaled_mm(
        there[0],
        there[1].t(),
        scale_a=one,
        scale_recipe_a=ScalingType.TensorWise,
        scale_b=one,
        scale_recipe_b=ScalingType.TensorWise,
        output_dtype=torch.bfloat16,
    )
    return _compared(found.cpu().float(), a @ b, torch.bfloat16, "a product in float8_e4m3fn")


def _int8(platform: Platform) -> str | None:
    a, b = (torch.randint(-128, 128, (_SIZE, _SIZE), dtype=torch.int8) for _ in range(2))
    found = int8_product(a.to(platform.device_type), b.to(platform.device_type))
    exact = a.int() @ b.int()
    if found.dtype != torch.int32 or not torch.equal(found.cpu(), exact):
        return "a product in int8 is not exact in int32"
    return None


def _streams(platform: Platform) -> str | None:
    first, second = (torch.Stream(device=platform.device_type) for _ in range(2))
    return "two streams are the same one" if first == second else None


def _graph_capture(platform: Platform) -> str | None:
    module = torch.get_device_module(platform.device_type)
    found = callable(getattr(module, "graph", None))
    return None if found else f"torch.{platform.device_type} has no graph()"


def _pinned_memory(platform: Platform) -> str | None:
    pinned = torch.empty(4, pin_memory=True).is_pinned()
    return None if pinned else "torch.empty(pin_memory=True) is not pinned"


def _unified_memory(platform: Platform) -> str | None:
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = platform.memory_info(0)[1]
    return f"memory_info says {total} bytes, and the host has {host}" if total > host else None


def _compared(found: Tensor, exact: Tensor, dtype: torch.dtype, what: str) -> str | None:
    _, rtol = DEFAULT_TOLERANCES.get(dtype, DEFAULT_TOLERANCES[torch.float32])
    worst = (found.to(exact.dtype) - exact).abs().max().item()
    allowed = rtol * max(exact.abs().max().item(), 1.0) + 1e-4
    return None if worst <= allowed else f"{what} is off by {worst:.3g}"  # NaN is off, too


SHOWN: Mapping[str, Callable[[Platform], str | None]] = {
    "bf16": _bf16,
    "fp8": _fp8,
    "int8": _int8,
    "streams": _streams,
    "graph_capture": _graph_capture,
    "pinned_memory": _pinned_memory,
    "unified_memory": _unified_memory,
}

CHECK = PlatformCheck(
    "capabilities", "models can compute in every supported dtype; declared capabilities work", _run
)

"""Tensors reach the device and come back."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.conformance.check import Findings
from opweave.conformance.platform.check import PlatformCheck
from opweave.conformance.platform.subject import PlatformSubject
from opweave.platforms import Platform

_SHAPES = ((3, 5), (1,), (0, 4), (17, 2, 9))


def _run(subject: PlatformSubject) -> Findings:
    platform = subject.platform
    platform.set_device(0)
    for dtype in (*platform.supported_dtypes, torch.int64, torch.bool):
        for shape in _SHAPES:
            host = (torch.rand(shape) * 100).to(dtype)
            yield _round_trip(platform, host)
        yield _round_trip(platform, (torch.rand(6, 4) * 100).to(dtype).t()[1::2])


def _round_trip(platform: Platform, host: Tensor) -> str | None:
    there = host.to(platform.device_type)
    platform.synchronize()
    what = f"{host.dtype} tensor of shape {tuple(host.shape)}, strides {host.stride()},"
    if there.device.type != platform.device_type:
        return f"a {what} sent to {platform.device_type!r} is on {there.device}"
    if (there.shape, there.dtype) != (host.shape, host.dtype):
        return f"a {what} is {there.dtype} of shape {tuple(there.shape)} on the device"
    return None if _same(there.cpu(), host) else f"a {what} comes back with other values"


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.tolist() == b.tolist()


CHECK = PlatformCheck(
    "device", "tensors of every supported dtype survive a copy to the device and back", _run
)

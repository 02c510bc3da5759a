"""A seed makes random numbers reproducible, on the device and the host."""

from __future__ import annotations

import torch

from opweave.conformance.check import Findings
from opweave.conformance.platform.check import PlatformCheck
from opweave.conformance.platform.subject import PlatformSubject
from opweave.platforms import Platform


def _run(subject: PlatformSubject) -> Findings:
    platform = subject.platform
    for device in dict.fromkeys((platform.device_type, "cpu")):
        first, again, other = (_drawn(platform, seed, device) for seed in (1, 1, 2))
        yield None if first == again else f"seed_all(1) twice gives different numbers on {device}"
        yield None if first != other else f"seed_all(1) and seed_all(2) give the same on {device}"


def _drawn(platform: Platform, seed: int, device: str) -> list[float]:
    platform.seed_all(seed)
    numbers: list[float] = torch.rand(64, device=device).cpu().tolist()
    return numbers


CHECK = PlatformCheck(
    "seed", "seed_all makes random numbers reproducible, on the device and host", _run
)

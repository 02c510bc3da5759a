"""Platforms that are wrong in one way each, and a sound one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from opweave.config import EngineConfig
from opweave.config.patches import ConfigPatch
from opweave.platforms import AttentionSpec, Capabilities, CpuPlatform
from opweave.plugins import Claim


class Sound(CpuPlatform):
    """The CPU, with one kernel."""

    name = "sound"

    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        return {"silu_and_mul": ["batch_invariant", "native"]}


class Nameless(Sound):
    def get_device_name(self, index: int = 0) -> str:
        return ""


class Overfull(Sound):
    def memory_info(self, index: int = 0) -> tuple[int, int]:
        return 2048, 1024


class Fractional(Sound):
    def memory_info(self, index: int = 0) -> tuple[int, int]:
        return 0.5, 1.0  # type: ignore[return-value]


class Secretive(Sound):
    def doctor(self) -> Mapping[str, object]:
        return {"driver": object()}


class Recording(Sound):
    def inference_mode(self) -> Any:
        return nullcontext()


class Choosy(Sound):
    def validate_request(self, params: Any) -> None:
        raise ValueError("no request is good enough")


class Unplaced(Sound):
    def check_and_update_config(self, config: EngineConfig) -> Sequence[ConfigPatch]:
        return [ConfigPatch("cache.blok_size", 16, "alignment")]


class Forceful(Sound):
    def config_defaults(self, config: EngineConfig) -> Sequence[ConfigPatch]:
        return [ConfigPatch("seed", 7, "luck", force=True)]


class Restless(Sound):
    def check_and_update_config(self, config: EngineConfig) -> Sequence[ConfigPatch]:
        return [ConfigPatch("seed", config.seed + 1, "variety", force=True)]


class Elsewhere(Sound):
    device_type = "meta"


class Wide(Sound):
    supported_dtypes = (torch.float32, torch.uint16)


class Recorder(Sound):
    capabilities = Capabilities(graph_capture=True)


class Boundless(Sound):
    capabilities = Capabilities(unified_memory=True)

    def memory_info(self, index: int = 0) -> tuple[int, int]:
        return 1 << 60, 1 << 60


class Unseeded(Sound):
    def seed_all(self, seed: int) -> None:
        pass


class OneSeed(Sound):
    def seed_all(self, seed: int) -> None:
        torch.manual_seed(0)


class Misspelled(Sound):
    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        return {"silu_and_mull": ["native"]}


class Unprovided(Sound):
    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        return {"silu_and_mul": ["batch_invariant", "nobody"]}


class Nobodys(Sound):
    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        return {"*": ["nobody"]}


class Jobless(Sound):
    def get_worker_cls(self, config: EngineConfig) -> str:
        return "nobody.worker.Worker"


class Functional(Sound):
    def get_sampler_cls(self, config: EngineConfig) -> str:
        return f"{__name__}.Sound.seed_all"


class Inattentive(Sound):
    def get_attn_backend_cls(self, spec: AttentionSpec) -> str:
        return f"{__name__}.Sound"


class Uncompiled(Sound):
    def get_compile_backend(self, config: EngineConfig) -> str:
        return "inductorr"


class Passing(Sound):
    def extra_passes(self, config: EngineConfig | None) -> Sequence[str]:
        return [f"{__name__}.absent"]  # which takes no graph


class Wrong(Sound):
    """Selects the kernel that the test registers, which adds one."""

    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        return {"silu_and_mul": ["zoo_wrong"]}


class WrongEverywhere(Sound):
    """Selects that kernel for every op that it implements."""

    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        return {"*": ["zoo_wrong"]}


BROKEN: Mapping[str, Sequence[type[Sound]]] = {
    "contract": (Nameless, Overfull, Fractional, Secretive, Recording, Choosy),
    "configuration": (Unplaced, Forceful, Restless),
    "device": (Elsewhere,),
    "capabilities": (Wide, Recorder, Boundless),
    "seed": (Unseeded, OneSeed),
    "priorities": (Misspelled, Unprovided, Nobodys),
    "references": (Jobless, Functional, Inattentive, Uncompiled, Passing),
    "kernels": (Wrong, WrongEverywhere),
}

# Functions that claim

_calls = itertools.count()


def sound() -> Claim:
    return Claim(f"{__name__}.Sound", api=1)


def fickle() -> Claim | None:
    return sound() if next(_calls) % 2 else None


def absent() -> Claim | None:
    return None


def slow() -> Claim:
    time.sleep(0.6)
    return sound()


def eager() -> Claim:
    torch.zoo = SimpleNamespace(is_initialized=lambda: True)  # type: ignore[attr-defined]
    return sound()


CLAIMS = {
    "fickle": "different answers",
    "absent": "device is not here",
    "slow": "for two calls",
    "eager": "starts the runtime of zoo",
}

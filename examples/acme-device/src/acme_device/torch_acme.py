"""``torch.acme``: what code that works on any device asks of a device's module."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_Device = torch.device | str | int | None


def is_available() -> bool:
    """Say whether there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Say whether devices can be used; they can once this module is there."""
    return True


def device_count() -> int:
    """Return the number of devices."""
    return int(torch.ops.acme.device_count())


def current_device() -> int:
    """Return the index of the device that this thread works on."""
    return int(torch.ops.acme.current_device())


def set_device(device: _Device) -> None:
    """Make this thread work on *device* (RuntimeError if it does not exist)."""
    torch.ops.acme.set_device(_index(device))


class device:  # noqa: N801 (torch.cuda.device is spelled so)
    """Works on another device inside a ``with`` block."""

    def __init__(self, device: _Device) -> None:
        self.index = _index(device)
        self._before = self.index

    def __enter__(self) -> device:
        self._before = current_device()
        set_device(self.index)
        return self

    def __exit__(self, *exception: object) -> None:
        set_device(self._before)


def synchronize(device: _Device = None) -> None:
    """Wait for the device: every call has finished when it returns, so there is nothing to do."""


def get_device_name(device: _Device = None) -> str:
    """Return what the device is called."""
    return "Acme One (host memory)"


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Return the free and the total memory of *device*, in bytes."""
    free, total = torch.ops.acme.memory_info(_index(device))
    return free, total


def memory_allocated(device: _Device = None) -> int:
    """Return how many bytes of *device* are in use."""
    free, total = mem_get_info(device)
    return total - free


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes for autocast."""
    return [torch.bfloat16, torch.float16]


# Random numbers are drawn on the host, from its generator.


def _is_in_bad_fork() -> bool:
    return False


def manual_seed(seed: int) -> None:
    """Seed the numbers that are drawn for the device."""
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: _Device = None) -> Tensor:
    """Return the state of the generator, on the host."""
    return torch.default_generator.get_state()


def get_rng_state_all() -> list[Tensor]:
    """Return the state for each device."""
    return [get_rng_state()] * device_count()


def set_rng_state(new_state: Tensor, device: _Device = None) -> None:
    """Set the state of the generator."""
    torch.default_generator.set_state(new_state)


def set_rng_state_all(new_states: Sequence[Tensor]) -> None:
    """Set the state for each device; they share one."""
    set_rng_state(new_states[0])


_INDUCTOR = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")


def __getattr__(name: str) -> Any:
    if name in _INDUCTOR:  # asked for when something is compiled; importing them takes a while
        return getattr(import_module("acme_device.inductor"), name)
    raise AttributeError(f"module 'torch.acme' has no attribute {name!r}")


def _index(device: _Device) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    found = torch.device(device)
    if found.type != "acme":
        raise ValueError(f"{device!r} is not an acme device.")
    return current_device() if found.index is None else found.index

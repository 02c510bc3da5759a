"""A driver for Triton without a GPU: kernels are compiled, and launches are recorded, not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from opweave.kernels.triton import launch

DEVICE = -1  # of CPU tensors


class Launched(NamedTuple):
    """A launch that reached the driver.

    Attributes:
        source: what the kernel was compiled from: a function, types, constants and attributes.
    """

    source: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


LAUNCHED: list[Launched] = []
"""All launches; compiled kernels stay in Triton's caches, so that the list outlives a driver."""


class RecordingLauncher:
    """A launcher with the parameters of Triton's, see ``triton.backends.nvidia.driver``."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.source = source

    def __call__(
        self,
        gridX: int,  # noqa: N803 (as in Triton)
        gridY: int,  # noqa: N803
        gridZ: int,  # noqa: N803
        stream: int,
        function: int,
        kernel_metadata: Any,
        launch_metadata: Any,
        launch_enter_hook: Any,
        launch_exit_hook: Any,
        *args: Any,
    ) -> None:
        LAUNCHED.append(Launched(self.source, (gridX, gridY, gridZ), args))


class SilentLauncher:
    """A launcher that does nothing, to measure the host's work until there."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(
        self,
        gridX: int,  # noqa: N803
        gridY: int,  # noqa: N803
        gridZ: int,  # noqa: N803
        stream: int,
        function: int,
        *args: Any,
    ) -> None:
        pass


@contextmanager
def fake_driver(launcher: type = RecordingLauncher) -> Iterator[None]:
    """Let kernels launch on CPU tensors, as if those were on an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    fake = SimpleNamespace(
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
            load_binary=lambda name, kernel, shared, device: (None, 1, 0, 0, 1024),
        ),
        launcher_cls=launcher,
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    with (
        patch.object(driver, "_active", fake),
        patch.object(launch, "_current_device", lambda: DEVICE),
    ):
        yield

"""The machine and software that a measurement is valid for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch

from opweave import native
from opweave.base.version import __version__
from opweave.platforms import current_platform


@dataclass(frozen=True)
class Machine:
    """A device, and the software on it.

    Attributes:
        platform: the platform, such as ``cpu``.
        device: the name of the device.
        isa: the instruction set of the C++ kernels, or an empty string.
        threads: the number of CPU threads.
        torch, opweave: the versions.
    """

    platform: str
    device: str
    isa: str
    threads: int
    torch: str
    opweave: str

    @classmethod
    def here(cls) -> Self:
        """Return this machine."""
        return cls(
            current_platform.name,
            current_platform.get_device_name(),
            native.status().isa or "",
            torch.get_num_threads(),
            torch.__version__,
            __version__,
        )

    def differences(self, other: Machine) -> str:
        """Return the fields in which *other* differs, in words."""
        mine, theirs = asdict(self), asdict(other)
        return ", ".join(
            f"{name} {theirs[name]!r} instead of {mine[name]!r}"
            for name in mine
            if mine[name] != theirs[name]
        )

    @classmethod
    def parse(cls, given: Any) -> Self | None:
        """Return the machine in a tuning file, or None if it is malformed."""
        kinds = {f.name: int if f.name == "threads" else str for f in fields(cls)}
        if not isinstance(given, dict) or not all(
            isinstance(given.get(name), kind) for name, kind in kinds.items()
        ):
            return None
        return cls(**{name: given[name] for name in kinds})

"""The subject of verification: a platform, and how a process finds it."""

from __future__ import annotations

from dataclasses import dataclass

from opweave.platforms import Platform


@dataclass(frozen=True)
class PlatformSubject:
    """A platform.

    Attributes:
        platform: the object, as opweave builds it.
        claim: the function that claims the device, ``"package.module:function"``; None if no
            installed plugin claims it, and the platform is given by its class.
        claimant: the name by which ``OPWEAVE_PLATFORM`` selects it.
        current: whether this process runs on it.
    """

    platform: Platform
    claim: str | None = None
    claimant: str | None = None
    current: bool = False

    def __str__(self) -> str:
        return f"platform {self.platform.name}"

    @property
    def qualname(self) -> str:
        """Module and name of its class."""
        cls = type(self.platform)
        return f"{cls.__module__}.{cls.__qualname__}"

"""The return value of a platform plugin whose device is present."""

from __future__ import annotations

from dataclasses import dataclass

PLATFORM_API = 1
"""Version of the platform interface of this opweave."""

BUILTIN_PLATFORMS = ("cpu", "cuda", "rocm", "tpu", "xpu")
"""Names of opweave's own platforms, which are reserved."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A platform plugin's claim to the device of this process.

    Attributes:
        platform: the qualified name of the platform's class, ``"package.module.Class"`` or
            ``"package.module:Class"``; imported only if the claim is chosen.
        api: the version of the platform interface that the class is written for.
        score: the highest claim is chosen. The CPU claims 0, the other platforms of opweave 50.
        why: why the device is considered present, for ``opweave doctor``.
    """

    platform: str
    api: int
    score: int = 100
    why: str = ""

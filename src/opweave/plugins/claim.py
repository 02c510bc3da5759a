"""What a platform plugin's function returns where its device is present."""

from __future__ import annotations

from dataclasses import dataclass

PLATFORM_API = 1
"""The version of the platform interface that this opweave has."""

BUILTIN_PLATFORMS = ("cpu", "cuda", "rocm", "tpu", "xpu")
"""The names of the platforms that come with opweave, which no plugin can have."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A platform plugin's claim to the device of this process.

    Attributes:
        platform: the qualified name of the platform's class, ``"package.module.Class"`` or
            ``"package.module:Class"``; imported only if the claim is chosen.
        api: the version of the platform interface that the class is written for.
        score: the highest claim is chosen. The CPU claims 0, the other platforms of opweave 50.
        why: why the device counts as present, for ``opweave doctor``.
    """

    platform: str
    api: int
    score: int = 100
    why: str = ""

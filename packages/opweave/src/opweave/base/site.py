"""Registration sites: file and line of the user's code."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from os.path import dirname, join
from types import FrameType

_OPWEAVE = join(dirname(dirname(__file__)), "")
_MACHINERY = (join(_OPWEAVE, "base"), join(_OPWEAVE, "ir"))


@dataclass(frozen=True, slots=True)
class Site:
    """A place in source code.

    >>> str(Site("kernels.py", 12))
    'kernels.py:12'
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def is_in_opweave(self) -> bool:
        """Whether it is in this package, not in a plugin's or a program's code."""
        return self.file.startswith(_OPWEAVE)


def caller_site() -> Site:
    """Return the innermost frame outside opweave's IR, except for the op declarations in it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame):
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno)


def _is_machinery(frame: FrameType) -> bool:
    # A module elsewhere that registers for whoever calls it says REGISTERS_FOR_CALLER = True.
    if dirname(frame.f_code.co_filename) in _MACHINERY:
        return True
    return bool(frame.f_globals.get("REGISTERS_FOR_CALLER", False))

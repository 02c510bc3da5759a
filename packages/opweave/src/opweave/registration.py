"""Registrations: their sites and owners."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from os.path import dirname, join
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

# Registration sites: file and line of the user's code.


_OPWEAVE = join(dirname(__file__), "")
_MACHINERY = (dirname(__file__), join(_OPWEAVE, "ir"))


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


# Owners: the plugins on whose behalf ops, implementations, layers and models are registered.


@dataclass(frozen=True, slots=True)
class Owner:
    """A plugin, and the distribution that provides it.

    Examples:
        >>> str(Owner("acme", "acme-device", "0.1.0"))
        'acme (acme-device 0.1.0)'
    """

    plugin: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.plugin} ({self.distribution} {self.version})"


_owner: ContextVar[Owner | None] = ContextVar("owner", default=None)


def current_owner() -> Owner | None:
    """Return the plugin that currently registers; None for opweave itself and for programs."""
    owner = _owner.get()
    return None if owner is None or is_own_import() else owner


@contextmanager
def bound(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give *variable* the value inside the block, in this thread or asyncio task only."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def owned_by(owner: Owner | None) -> AbstractContextManager[None]:
    """Make *owner* the owner of everything that is registered inside the block."""
    return bound(_owner, owner)


def is_own_import() -> bool:
    """Whether a module of opweave itself is being imported.

    A plugin may import it first, but does not own the module's registrations.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            return str(frame.f_globals.get("__name__")).startswith(_PACKAGE)
        frame = frame.f_back
    return False


_PACKAGE = __name__.partition(".")[0] + "."
_ways_out: dict[Owner, str] = {}


def note_way_out(owner: Owner, setting: str) -> None:
    """Remember the *setting* that leaves a plugin out, such as ``"OPWEAVE_PLUGINS=-acme"``."""
    _ways_out[owner] = setting


def way_out(owner: Owner | None) -> str:
    """Return a sentence on how to continue without a plugin, for messages about its errors.

    Examples:
        >>> way_out(None)
        ''
    """
    setting = None if owner is None else _ways_out.get(owner)
    return "" if setting is None else f" To go on without the plugin: {setting}."


_absences: dict[str, str] = {}


def note_absence(plugin: str, why: str | None) -> None:
    """Remember why a plugin registered nothing, such as ``"failed to load"``; None: forget it."""
    _absences.pop(plugin, None)
    if why is not None:
        _absences[plugin] = why


def absences_note() -> str:
    """Return a sentence for each reason why plugins are absent, for messages about unknown names.

    Examples:
        >>> absences_note()
        ''
    """
    absent: dict[str, list[str]] = {}
    for plugin, why in _absences.items():
        absent.setdefault(why, []).append(plugin)
    return "".join(
        f" It may be of {' or '.join(plugins)}, which {why}." for why, plugins in absent.items()
    )

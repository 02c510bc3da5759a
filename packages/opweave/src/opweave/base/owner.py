"""Owners: the plugins on whose behalf ops, implementations, layers and models are registered."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType


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
def owned_by(owner: Owner | None) -> Iterator[None]:
    """Make *owner* the owner of everything that is registered inside the block."""
    token = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(token)


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

"""Compiler passes that plugins bring, by name; they are imported when something is compiled."""

from __future__ import annotations

from typing import NamedTuple

from opweave.base.owner import Owner
from opweave.config.open_registry import OpenRegistry
from opweave.platforms.base import Platform
from opweave.platforms.resolution import resolution
from opweave.plugins.qualname import split_qualname

registered_passes: OpenRegistry[str] = OpenRegistry("compiler pass")
"""What :func:`register_pass` was given."""


class PassReference(NamedTuple):
    """A pass by its qualified name, and who brings it."""

    qualname: str
    owner: Owner | None


def register_pass(qualname: str) -> None:
    """Add a compiler pass for every platform; :meth:`Platform.extra_passes` adds for one.

    Args:
        qualname: of the function, such as ``"acme.passes.fold_scales"``; see
            :mod:`opweave.compile.plugin_passes`.

    Raises:
        DuplicateNameError: (a ValueError) it is registered already.
        ReferenceNameError: (an ImportError) it is no such name.
    """
    split_qualname(qualname)
    registered_passes.add(qualname, qualname)


def pass_references(platform: Platform) -> list[PassReference]:
    """Return the passes in the order in which they run: the registered, then the platform's."""
    found = {
        name: PassReference(name, entry.owner) for name, entry in registered_passes.entries.items()
    }
    owner = resolution().owner
    for name in platform.extra_passes(None):
        found.setdefault(name, PassReference(name, owner))
    return list(found.values())

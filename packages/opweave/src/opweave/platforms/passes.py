"""Compiler passes of plugins, by qualified name; they are imported at the first compilation."""

from __future__ import annotations

from typing import NamedTuple

from opweave.base.owner import Owner
from opweave.config.open_registry import OpenRegistry
from opweave.platforms.base import Platform
from opweave.platforms.resolution import resolution
from opweave.plugins.qualname import split_qualname

registered_passes: OpenRegistry[str] = OpenRegistry("compiler pass")
"""The passes registered with :func:`register_pass`."""


class PassReference(NamedTuple):
    """The qualified name of a pass, and the plugin that registered it."""

    qualname: str
    owner: Owner | None


def register_pass(qualname: str) -> None:
    """Add a compiler pass for all platforms; :meth:`Platform.extra_passes` adds passes for one.

    Args:
        qualname: the qualified name of the function, such as ``"acme.passes.fold_scales"``; see
            :mod:`opweave.compile.plugin_passes`.

    Raises:
        DuplicateNameError: (a ValueError) it is already registered.
        ReferenceNameError: (an ImportError) it is not a qualified name.
    """
    split_qualname(qualname)
    registered_passes.add(qualname, qualname)


def pass_references(platform: Platform) -> list[PassReference]:
    """Return the passes in the order in which they run: registered ones, then the platform's."""
    found = {
        name: PassReference(name, entry.owner) for name, entry in registered_passes.entries.items()
    }
    owner = resolution().owner
    for name in platform.extra_passes(None):
        found.setdefault(name, PassReference(name, owner))
    return list(found.values())

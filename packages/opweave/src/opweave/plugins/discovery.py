"""Finds installed plugins without importing them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import EntryPoint
from itertools import groupby

from opweave.ir.errors import did_you_mean
from opweave.plugins.claim import BUILTIN_PLATFORMS
from opweave.plugins.entry import PluginEntry
from opweave.plugins.errors import DuplicatePluginError, PluginError, ReservedPluginNameError
from opweave.plugins.groups import COMMAND_LINE_GROUPS, GROUPS, PLATFORM_PLUGINS, PREFIX


def find(points: Iterable[EntryPoint]) -> list[PluginEntry]:
    """Return the plugins among *points*, by group and name; unusable ones have a ``fault``."""
    own = sorted(
        (PluginEntry.of(point) for point in points if point.group in GROUPS),
        key=lambda entry: (entry.group, entry.name, entry.value, entry.owner.distribution),
    )
    return [
        entry
        for _, namesakes in groupby(own, key=lambda entry: (entry.group, entry.name))
        for entry in _checked(list(namesakes))
    ]


def misspelled_groups(points: Iterable[EntryPoint]) -> list[str]:
    """Return a message for each entry point in a misspelled group."""
    return sorted(
        f"{_distribution(point)} declares the entry point {point.name!r} in the group "
        f"{point.group!r}, which opweave does not have: it is never loaded. "
        f"{did_you_mean(point.group, GROUPS)}"
        for point in points
        if point.group.startswith(PREFIX) and point.group not in (*GROUPS, *COMMAND_LINE_GROUPS)
    )


def _checked(namesakes: list[PluginEntry]) -> list[PluginEntry]:
    """Return the plugins of one group and name: one, unless they are different objects."""
    first = namesakes[0]
    fault: PluginError | None = None
    if len({entry.value for entry in namesakes}) > 1:
        fault = _duplicate(namesakes)
    elif first.group == PLATFORM_PLUGINS and first.name in BUILTIN_PLATFORMS:
        namesakes, fault = [first], _reserved(first)
    else:
        namesakes = [first]  # the same object, declared twice
    return namesakes if fault is None else [replace(entry, fault=fault) for entry in namesakes]


def _duplicate(namesakes: list[PluginEntry]) -> DuplicatePluginError:
    first = namesakes[0]
    places = " and ".join(f"{e.value} of {e.owner.distribution}" for e in namesakes)
    return DuplicatePluginError(
        f"{GROUPS[first.group].kind} {first.name!r} exists {len(namesakes)} times: {places}. "
        "Uninstall all but one of these distributions (pip uninstall "
        f"{namesakes[-1].owner.distribution})"
    )


def _reserved(entry: PluginEntry) -> ReservedPluginNameError:
    return ReservedPluginNameError(
        f"{entry} has the name of a platform that comes with opweave "
        f"({', '.join(BUILTIN_PLATFORMS)}), so nothing could tell them apart. Its authors must "
        "choose another name"
    )


def _distribution(point: EntryPoint) -> str:
    if point.dist is None:
        return "an unknown distribution"
    return f"{point.dist.name} {point.dist.version}"

"""The load order of plugins: requirements come first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from opweave.plugins.entry import PluginEntry
from opweave.plugins.errors import PluginRequirementError


class Order(NamedTuple):
    """The plugins in load order, and those in a cycle."""

    entries: list[PluginEntry]
    errors: dict[str, PluginRequirementError]


def in_order(entries: Sequence[PluginEntry]) -> Order:
    """Sort *entries* topologically by requirements, then by name.

    Unknown names are ignored here: whether a requirement is met is known only after loading it.
    """
    left = {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}
    errors: dict[str, PluginRequirementError] = {}
    while True:
        try:
            return Order([left[name] for name in _sorted(left)], errors)
        except CycleError as error:
            cycle: list[str] = error.args[1][::-1]
            for name in set(cycle):
                errors[name] = _in_a_cycle(left.pop(name), cycle)


def _sorted(entries: Mapping[str, PluginEntry]) -> list[str]:
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, entry in entries.items():
        before = {*entry.requires, *entry.after} & entries.keys()
        sorter.add(name, *sorted(before))
    return list(sorter.static_order())


def _in_a_cycle(entry: PluginEntry, cycle: Sequence[str]) -> PluginRequirementError:
    # graphlib lists predecessors first; reversed, each entry waits for the next.
    return PluginRequirementError(
        f"{entry} can never load, because each of these waits for the next: "
        f"{' → '.join(cycle)}. Their entry points must not require each other"
    )

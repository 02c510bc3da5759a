"""Find installed plugins without importing them, apply the user's policy, and order them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import EntryPoint
from itertools import groupby
from typing import NamedTuple

from opweave.config.environment import flag
from opweave.ir.errors import did_you_mean
from opweave.plugins.entry import (
    BUILTIN_PLATFORMS,
    COMPANION_GROUPS,
    GROUPS,
    PLATFORM_PLUGINS,
    PREFIX,
    DuplicatePluginError,
    PluginEntry,
    PluginError,
    PluginPolicyError,
    PluginRequirementError,
    ReservedPluginNameError,
)

# Plugin settings from the environment.


PLUGINS = "OPWEAVE_PLUGINS"
PLATFORM = "OPWEAVE_PLATFORM"
STRICT = "OPWEAVE_PLUGINS_STRICT"


@dataclass(frozen=True)
class PluginPolicy:
    """The user's settings about plugins.

    Attributes:
        only: the plugins to use; None: all.
        without: disabled plugins.
        platform: the platform to use, regardless of claims.
        strict: whether a failed plugin is an error.
    """

    only: frozenset[str] | None = None
    without: frozenset[str] = frozenset()
    platform: str | None = None
    strict: bool = True

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> PluginPolicy:
        """Read the policy from environment variables.

        Raises:
            PluginPolicyError: (a ValueError) a plugin is both enabled and disabled.
            SettingError: ``OPWEAVE_PLUGINS_STRICT`` is neither true nor false.
        """
        only, without = _names(environ.get(PLUGINS))
        return cls(
            only,
            without,
            environ.get(PLATFORM, "").strip() or None,
            flag(STRICT, environ) if environ.get(STRICT, "").strip() else True,
        )

    def permits(self, name: str) -> bool:
        """Return whether a plugin of that name is used."""
        return name not in self.without and (self.only is None or name in self.only)

    def check(self, installed: Iterable[str]) -> None:
        """Check that the plugins named are among those *installed*.

        Raises:
            PluginPolicyError: (a ValueError) a plugin is not installed, and is not one of opweave's
            platforms.
        """
        names = {*installed}
        for name in sorted({*(self.only or ()), *self.without} - names):
            raise PluginPolicyError(
                f"{PLUGINS} names {name!r}, but no plugin is called that. "
                f"{did_you_mean(name, names)} Mend {PLUGINS}, or install the package that has it."
            )
        platforms = names | {*BUILTIN_PLATFORMS}
        if self.platform is not None and self.platform not in platforms:
            raise PluginPolicyError(
                f"{PLATFORM}={self.platform!r}: no platform is called that. "
                f"{did_you_mean(self.platform, platforms)} Mend {PLATFORM}, or install the package "
                "that has it."
            )

    def leaving_out(self, name: str) -> str:
        """Return the setting that leaves out a plugin and keeps this policy otherwise.

        >>> chosen = PluginPolicy(only=frozenset({"a", "b"}))
        >>> PluginPolicy().leaving_out("acme"), chosen.leaving_out("a")
        ('OPWEAVE_PLUGINS=-acme', 'OPWEAVE_PLUGINS=b')
        """
        if self.only is not None:
            return f"{PLUGINS}={','.join(sorted(self.only - {name}))}"
        return f"{PLUGINS}={','.join(f'-{other}' for other in sorted(self.without | {name}))}"


def _names(value: str | None) -> tuple[frozenset[str] | None, frozenset[str]]:
    if value is None:
        return None, frozenset()
    tokens = [token.strip() for token in value.split(",")]
    without = frozenset(token[1:].strip() for token in tokens if token.startswith("-"))
    only = frozenset(token for token in tokens if token and not token.startswith("-"))
    if both := sorted(only & without):
        raise PluginPolicyError(
            f"{PLUGINS}={value!r} both asks for {both[0]!r} and leaves it out. Keep one of the two."
        )
    if "" in without:
        raise PluginPolicyError(
            f"{PLUGINS}={value!r} has a '-' without a name. Expected names, separated by commas: "
            "'a,b' for these alone, '-a' for all others."
        )
    return (None if without and not only else only), without


# Finds installed plugins without importing them.


def find(points: Iterable[EntryPoint]) -> list[PluginEntry]:
    """Return the plugins among *points*, by group and name; unusable ones have a ``fault``."""
    entries = sorted(
        (PluginEntry.of(point) for point in points if point.group in GROUPS),
        key=lambda entry: (entry.group, entry.name, entry.value, entry.owner.distribution),
    )
    return [
        entry
        for _, namesakes in groupby(entries, key=lambda entry: (entry.group, entry.name))
        for entry in _checked(list(namesakes))
    ]


def misspelled_groups(points: Iterable[EntryPoint]) -> list[str]:
    """Return a message for each entry point in a misspelled group."""
    return sorted(
        f"{_distribution(point)} declares the entry point {point.name!r} in the group "
        f"{point.group!r}, which opweave does not have: it is never loaded. "
        f"{did_you_mean(point.group, GROUPS)}"
        for point in points
        if point.group.startswith(PREFIX) and point.group not in (*GROUPS, *COMPANION_GROUPS)
    )


def _checked(namesakes: list[PluginEntry]) -> list[PluginEntry]:
    """Return the plugins of one group and name: one, unless they are different objects."""
    first = namesakes[0]
    fault: PluginError | None = None
    if len({entry.value for entry in namesakes}) > 1:
        fault = _duplicate(namesakes)
    elif first.group == PLATFORM_PLUGINS and first.name in BUILTIN_PLATFORMS:
        namesakes = [first]
        fault = ReservedPluginNameError(
            f"{first} has the name of a platform that comes with opweave "
            f"({', '.join(BUILTIN_PLATFORMS)}), so nothing could tell them apart. Its authors must "
            "choose another name"
        )
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


def _distribution(point: EntryPoint) -> str:
    if point.dist is None:
        return "an unknown distribution"
    return f"{point.dist.name} {point.dist.version}"


# The load order of plugins: requirements come first.


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
            # graphlib lists predecessors first; reversed, each entry waits for the next.
            cycle: list[str] = error.args[1][::-1]
            for name in set(cycle):
                errors[name] = PluginRequirementError(
                    f"{left.pop(name)} can never load, because each of these waits for the next: "
                    f"{' → '.join(cycle)}. Their entry points must not require each other"
                )


def _sorted(entries: Mapping[str, PluginEntry]) -> list[str]:
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, entry in entries.items():
        before = {*entry.requires, *entry.after} & entries.keys()
        sorter.add(name, *sorted(before))
    return list(sorter.static_order())

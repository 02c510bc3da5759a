"""A plugin as declared by its distribution."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Any

from opweave.base.owner import Owner
from opweave.plugins.errors import PluginError, PluginTypeError
from opweave.plugins.groups import GROUPS

_BRACKETS = re.compile(r"\[(.*)\]\s*$")
_RELATIONS = ("requires", "after")


@dataclass(frozen=True)
class PluginEntry:
    """An installed plugin, which is not imported.

    Attributes:
        name: its name in settings.
        group: its group, one of :data:`opweave.plugins.GROUPS`.
        value: the object to import, ``"package.module:function"``.
        owner: plugin, distribution and version.
        requires: plugins of the group that must be loaded before.
        after: plugins of the group that are loaded before if they are installed.
        fault: why it cannot be used, or an empty string.
    """

    name: str
    group: str
    value: str
    owner: Owner
    requires: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    fault: PluginError | None = None
    _point: EntryPoint | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, point: EntryPoint) -> PluginEntry:
        """Parse an entry point."""
        distribution = point.dist
        owner = Owner(
            point.name,
            "unknown distribution" if distribution is None else distribution.name,
            "?" if distribution is None else distribution.version,
        )
        value = _BRACKETS.sub("", point.value).strip()
        entry = cls(point.name, point.group, value, owner, _point=point)
        if point.pattern.match(point.value) is None:
            message = (
                f"{entry} cannot be imported: {point.value!r} is not a package.module:function"
            )
            return replace(entry, fault=PluginTypeError(message))
        try:
            named = _relations(entry, point.value)
        except PluginTypeError as error:
            return replace(entry, fault=error)
        return replace(entry, requires=named["requires"], after=named["after"])

    def __str__(self) -> str:
        return (
            f"{GROUPS[self.group].kind} {self.name!r} ({self.value}, of {self.owner.distribution} "
            f"{self.owner.version})"
        )

    @property
    def package(self) -> str:
        """The top-level package to import."""
        return self.value.partition(":")[0].partition(".")[0].strip()

    def load(self) -> Any:
        """Import the object of the entry point."""
        assert self._point is not None, self
        return self._point.load()


def _relations(entry: PluginEntry, value: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = dict.fromkeys(_RELATIONS, ())
    brackets = _BRACKETS.search(value)
    for token in filter(None, map(str.strip, brackets[1].split(",") if brackets else ())):
        relation, _, name = token.partition(".")
        if relation not in _RELATIONS or not name:
            raise PluginTypeError(
                f"{entry}: its entry point says [{token}]. Expected requires.NAME or after.NAME, "
                "where NAME is another plugin of its group."
            )
        found[relation] = (*found[relation], name)
    return found

"""Process-wide choices of a registry: priorities by source, required traits, donation checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from opweave.ir.priority import Entries, Source, parse
from opweave.ir.traits import check_traits

Requirements = Mapping[str, str]  # trait -> who requires it


class Settings:
    """What is set for the whole process. Every change invalidates the compiled fast paths."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._priorities: dict[Source, dict[str, Entries]] = {}
        self._required: dict[Source, dict[str, str]] = {}
        self._check_donation = False

    def set_priorities(
        self,
        source: Source,
        lists: Mapping[str, str | Iterable[str]],
        origin: str | Callable[[str], str],
    ) -> None:
        """Replace every list of *source*; *origin* names the setting, for each op if a function.

        Names are not checked here: they may belong to a plugin that loads later. They are
        checked when an op is first used, and all together by ``Registry.check_settings``.
        """
        named = origin if callable(origin) else lambda op: origin
        self._priorities[source] = {op: parse(names, named(op)) for op, names in lists.items()}
        self._on_change()

    def set_priority_of(self, source: Source, op: str, entries: Entries | None) -> None:
        """Replace the list of *source* for one op; None takes it away."""
        lists = self._priorities.setdefault(source, {})
        if entries is None:
            lists.pop(op, None)
        else:
            lists[op] = entries
        self._on_change()

    def priorities(self, op: str) -> list[Entries]:
        """Return the lists for *op*, strongest first."""
        by_source = [self._priorities[s] for s in sorted(self._priorities)]
        return [lists[op] for lists in by_source if op in lists]

    def configured_ops(self) -> dict[str, str]:
        """Return every op that some source names, with the origin of the first mention."""
        named: dict[str, str] = {}
        for source in sorted(self._priorities):
            for op, entries in self._priorities[source].items():
                named.setdefault(op, entries[0].origin)
        return named

    def require(self, source: Source, traits: Iterable[str], origin: str) -> None:
        """Replace the traits that *source* requires of every implementation."""
        self._required[source] = dict.fromkeys(sorted(check_traits(traits)), origin)
        self._on_change()

    @property
    def required(self) -> Requirements:
        """The required traits and who requires each."""
        merged: dict[str, str] = {}
        for source in sorted(self._required):
            merged = {**self._required[source], **merged}
        return merged

    @property
    def check_donation(self) -> bool:
        """Whether ``maybe_inplace`` overwrites donated inputs that were not reused with NaN."""
        return self._check_donation

    @check_donation.setter
    def check_donation(self, on: bool) -> None:
        self._check_donation = on
        self._on_change()

"""Process-wide settings of a registry: priorities by source, required traits, donation checks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from opweave.base import transaction
from opweave.base.owner import Owner, current_owner, way_out
from opweave.ir.errors import ReplacedWarning
from opweave.ir.priority import EVERY_OP, Entries, SizeRange, Source, parse
from opweave.ir.traits import check_traits

Requirements = Mapping[str, str]  # trait -> the setting that requires it


class Settings:
    """Process-wide settings. Every change invalidates the generated fast paths."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._priorities: dict[Source, dict[str, Entries]] = {}
        self._default_owners: dict[str, Owner | None] = {}
        self._required: dict[Source, dict[str, str]] = {}
        self._check_donation = False
        self._tuned: dict[str, tuple[SizeRange, ...]] = {}

    def set_tuned(self, ranges: Mapping[str, Sequence[SizeRange]]) -> None:
        """Replace the priorities of the tuning file.

        Args:
            ranges: for each op, lists for numbers of tokens in ascending order; the last one has
                no limit. Providers that are not registered are skipped.
        """
        self._tuned = {op: tuple(found) for op, found in ranges.items()}
        self._on_change()

    def tuned(self, op: str) -> tuple[SizeRange, ...]:
        """Return the lists of the tuning file for *op*, by number of tokens."""
        return self._tuned.get(op, ())

    def set_priorities(
        self,
        source: Source,
        lists: Mapping[str, str | Iterable[str]],
        origin: str | Callable[[str], str],
    ) -> None:
        """Replace all lists of *source*.

        Names are not checked here, since a plugin may declare them later. They are checked when
        an op is first used, and by ``Registry.check_settings``.

        Args:
            source: the source to replace.
            lists: priority lists by op name.
            origin: description of the setting, or a function from op name to description.
        """
        named = origin if callable(origin) else lambda op: origin
        self._priorities[source] = {op: parse(names, named(op)) for op, names in lists.items()}
        self._on_change()

    def set_default(self, op: str, entries: Entries | None) -> None:
        """Replace the default of one op on behalf of the current owner; None removes it.

        Warn if a plugin replaces the default of another owner, since the result then depends on
        the load order.
        """
        defaults = self._priorities.setdefault(Source.SET_DEFAULT, {})
        before, owner = (defaults.get(op), self.default_owner(op)), current_owner()
        if before[0] is not None and owner not in (None, before[1]):
            warnings.warn(_replaced(op, before[0], owner), ReplacedWarning, stacklevel=3)
        self._enter_default(op, entries, owner)

        def undo() -> None:
            if defaults.get(op) is entries:
                self._enter_default(op, *before)

        transaction.enter(f"default of {op}", undo)

    def default_owner(self, op: str) -> Owner | None:
        """Return the plugin that set the default of the op, if any."""
        return self._default_owners.get(op)

    def _enter_default(self, op: str, entries: Entries | None, owner: Owner | None) -> None:
        defaults = self._priorities[Source.SET_DEFAULT]
        if entries is None:
            defaults.pop(op, None)
        else:
            defaults[op] = entries
        self._default_owners[op] = owner
        self._on_change()

    def priorities(self, op: str, providers: Container[str], tuned: Entries = ()) -> list[Entries]:
        """Return the lists for *op*, strongest first.

        Args:
            op: the name of the op.
            providers: its implementations; others are left out of the platform's ``"*"`` list.
            tuned: the list of the tuning file.
        """
        by_source = {s: lists[op] for s, lists in self._priorities.items() if op in lists}
        if tuned:
            by_source[Source.TUNED] = tuned
        if Source.PLATFORM not in by_source:
            usual = self._priorities.get(Source.PLATFORM, {}).get(EVERY_OP, ())
            by_source[Source.PLATFORM] = tuple(e for e in usual if e.provider in providers)
        return [by_source[source] for source in sorted(by_source)]

    def configured_ops(self) -> dict[str, str]:
        """Return the ops that any source names, with the origin of the strongest."""
        named: dict[str, str] = {}
        for source in sorted(self._priorities):
            for op, entries in self._priorities[source].items():
                if (source, op) != (Source.PLATFORM, EVERY_OP):
                    named.setdefault(op, entries[0].origin)
        return named

    def require(self, source: Source, traits: Iterable[str], origin: str) -> None:
        """Replace the traits that *source* requires of every implementation."""
        self._required[source] = dict.fromkeys(sorted(check_traits(traits)), origin)
        self._on_change()

    @property
    def required(self) -> Requirements:
        """The required traits, and the setting behind each."""
        merged: dict[str, str] = {}
        for source in sorted(self._required):
            merged = {**self._required[source], **merged}
        return merged

    @property
    def check_donation(self) -> bool:
        """Whether ``maybe_inplace`` fills donated inputs that were not reused with NaN."""
        return self._check_donation

    @check_donation.setter
    def check_donation(self, on: bool) -> None:
        self._check_donation = on
        self._on_change()


def default_origin(op: str) -> str:
    """Return the origin of a default that the current owner sets."""
    owner = current_owner()
    return f"{op}.set_default(...)" + ("" if owner is None else f" of the plugin {owner}")


def _replaced(op: str, before: Entries, owner: Owner | None) -> str:
    names = ",".join(map(str, before))
    return (
        f"{op}: the plugin {owner} replaces the default {names} ({before[0].origin}). To override "
        f"both, set a priority, such as OPWEAVE_IR_OP_PRIORITY__{op.upper()}={names}."
        f"{way_out(owner)}"
    )

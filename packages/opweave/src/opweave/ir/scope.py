"""Scopes and settings: priorities and required traits, for a block of code and for the process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from opweave import torch_compat, transaction
from opweave.ir.errors import ReplacedWarning
from opweave.ir.priority import EVERY_OP, Entries, SizeRange, Source, parse
from opweave.ir.rules import check_traits
from opweave.registration import Owner, current_owner, way_out

# Scopes: priorities and required traits for a block of code, in one thread or asyncio task.


Recorder = Callable[..., None]
"""Called with the :class:`opweave.ir.Selection` and the values of each call."""


class Scope:
    """The settings of a ``with`` block, merged with those of the enclosing scope.

    Attributes:
        priorities: for each op, its lists, innermost first.
        required: the required traits, and the setting behind each.
        recorders: called for every call of an op.
    """

    def __init__(
        self,
        parent: Scope | None,
        priorities: Mapping[Hashable, Entries] | None = None,
        required: Mapping[str, str] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        inherited = parent.priorities if parent else {}
        new = priorities or {}
        self.priorities: dict[Hashable, list[Entries]] = {
            op: [new[op], *inherited.get(op, [])] if op in new else inherited[op]
            for op in {**new, **inherited}
        }
        self.required: dict[str, str] = {**(parent.required if parent else {}), **(required or {})}
        self.recorders: tuple[Recorder, ...] = (parent.recorders if parent else ()) + (
            (recorder,) if recorder else ()
        )
        # (call path, its version) -> the function generated for it under this scope
        self.compiled: dict[tuple[object, int], Callable[..., Any]] = {}


_current: ContextVar[Scope | None] = ContextVar("opweave_ir_scope", default=None)
current_scope = _current.get


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Make *scope* the current one inside the block."""
    token = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def require(*traits: str) -> Iterator[None]:
    """Admit only implementations with all of *traits* inside the block.

    ``with ir.require("batch_invariant"): ...``

    Raises:
        UnknownTraitError: a trait does not exist.
    """
    required = dict.fromkeys(sorted(check_traits(traits)), "scope ir.require(...)")
    with entered(Scope(current_scope(), required=required)):
        yield


def left_to_python(name: str, enter: Callable[..., Any]) -> None:
    """Make Dynamo break the graph where a compiled function enters a scope, and say why.

    A function is compiled for the scope that it is called in, so entering one inside would be too
    late. After the break, Python runs the block.

    Args:
        name: the name in messages, such as ``ir.priority``.
        enter: the function that enters the scope.
    """
    message = (
        f"{name} cannot be traced inside a compiled function. Enter it around the call of the "
        "compiled function, or name the provider at the call: op.using('provider')(...)."
    )

    def traced(*args: Any, **kwargs: Any) -> Any:
        torch_compat.graph_break(message)

    torch_compat.trace_instead(enter, traced)
    torch_compat.run_untraced(
        getattr(enter, "__wrapped__", enter)
    )  # the generator of a contextmanager


torch_compat.run_untraced(getattr(entered, "__wrapped__"))  # noqa: B009 (not to be typed)
left_to_python("ir.require", require)


# Process-wide settings of a registry: priorities by source, required traits, donation checks.


Requirements = Mapping[str, str]  # trait -> the setting that requires it


class Settings:
    """Process-wide settings. Every change invalidates the generated fast paths.

    Args:
        on_change: called after each change.
        ensure_ready: loads plugins, kernels and settings unless they are loaded.

    Attributes:
        ensure_ready: as given.
        lock: held during changes of settings and registrations.
    """

    def __init__(
        self, on_change: Callable[[], None], ensure_ready: Callable[[], None] = lambda: None
    ) -> None:
        self._on_change, self.ensure_ready = on_change, ensure_ready
        self.lock = threading.RLock()
        self._priorities: dict[Source, dict[str, Entries]] = {}
        self._defaults: dict[str, tuple[Entries, Owner | None]] = {}
        self._required: dict[Source, dict[str, str]] = {}
        self._check_donation = False
        self._tuned: dict[str, tuple[SizeRange, ...]] = {}

    def set_tuned(self, ranges: Mapping[str, Sequence[SizeRange]]) -> None:
        """Replace the priorities of the tuning file.

        Args:
            ranges: for each op, lists for numbers of tokens in ascending order; the last one has
                no limit. Providers that are not registered are skipped.
        """
        self._tuned = {op: tuple(by_size) for op, by_size in ranges.items()}
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
        former, owner = self._defaults.get(op), current_owner()
        if former is not None and owner not in (None, former[1]):
            warnings.warn(_replaced(op, former[0], owner), ReplacedWarning, stacklevel=3)
        default = None if entries is None else (entries, owner)
        transaction.enter(f"default of {op}", self._defaults, op, default, self._on_change)
        self._on_change()

    def default_owner(self, op: str) -> Owner | None:
        """Return the plugin that set the default of the op, if any."""
        return self._defaults[op][1] if op in self._defaults else None

    def priorities(self, op: str, providers: Container[str], tuned: Entries = ()) -> list[Entries]:
        """Return the lists for *op*, strongest first.

        Args:
            op: the name of the op.
            providers: its implementations; others are left out of the platform's ``"*"`` list.
            tuned: the list of the tuning file.
        """
        by_source = {s: lists[op] for s, lists in self._priorities.items() if op in lists}
        if op in self._defaults:
            by_source[Source.SET_DEFAULT] = self._defaults[op][0]
        if tuned:
            by_source[Source.TUNED] = tuned
        if Source.PLATFORM not in by_source:
            usual = self._priorities.get(Source.PLATFORM, {}).get(EVERY_OP, ())
            by_source[Source.PLATFORM] = tuple(e for e in usual if e.provider in providers)
        return [by_source[source] for source in sorted(by_source)]

    def configured_ops(self) -> dict[str, str]:
        """Return the ops that any source names, with the origin of the strongest."""
        named: dict[str, str] = {}
        defaults = {op: entries for op, (entries, _) in self._defaults.items()}
        for source, lists in sorted({**self._priorities, Source.SET_DEFAULT: defaults}.items()):
            for op, entries in lists.items():
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

"""Priorities: which providers to try for an op, in which order, and who said so.

Sources, strongest first: call site, scope, command line, environment, config file,
``set_default``, platform default, native. A stronger source's list is put in front of a weaker
one's; native is always last.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from opweave.ir.errors import SettingError

NATIVE = "native"
RENAMED = {"row_by_row": "batch_invariant"}
"""Deprecated names of providers; priority lists accept them, with a DeprecationWarning."""
ALWAYS_LAST = "always last"  # the origin of native where nobody asked for it


class Source(enum.IntEnum):
    """Where a priority list comes from; a smaller value is stronger."""

    CALL_SITE = 0
    """``op.using(...)``."""
    SCOPE = 1
    """A ``with`` block of ``ir.priority`` or ``op.set_priority``."""
    COMMAND_LINE = 2
    """``--ir-op-priority.<op>``."""
    ENVIRONMENT = 3
    """``OPWEAVE_IR_OP_PRIORITY__<OP>``."""
    CONFIG_FILE = 4
    """``[ir_op_priority]``."""
    SET_DEFAULT = 5
    """``op.set_default``."""
    PLATFORM = 6
    """What the platform prefers."""
    NATIVE = 7
    """The definition, which is always last."""


class Entry(NamedTuple):
    """One provider in a priority list.

    Attributes:
        provider: its name.
        strict: written ``name!``: an error if it cannot be used, instead of passing over it.
        origin: who asked for it, as a user would recognise it.
    """

    provider: str
    strict: bool
    origin: str

    def __str__(self) -> str:
        return f"{self.provider}!" if self.strict else self.provider


Entries = tuple[Entry, ...]


def parse(providers: str | Iterable[str], origin: str) -> Entries:
    """Read a priority list, given as a list of names or as one comma-separated string.

    Examples:
        >>> [str(entry) for entry in parse("triton!, opweave_c", "the command line")]
        ['triton!', 'opweave_c']

    Raises:
        SettingError: the list is empty, or holds something that is no name.
    """
    if not isinstance(providers, Iterable):
        raise SettingError(
            f"{origin}: {providers!r} is no list of providers. Write one, such as "
            "['opweave_c', 'native']."
        )
    names = providers.split(",") if isinstance(providers, str) else list(providers)
    entries = tuple(_entry(name, origin) for name in names)
    if not entries:
        raise SettingError(
            f"{origin}: the priority list is empty. Give at least one provider, such as 'native'."
        )
    return entries


def _entry(name: object, origin: str) -> Entry:
    if not isinstance(name, str):
        raise SettingError(
            f"{origin}: {name!r} is not the name of a provider. "
            "Write a list of names, such as ['opweave_c', 'native']."
        )
    bare = name.strip().removesuffix("!")
    if not bare.isidentifier():
        raise SettingError(
            f"{origin}: {name!r} is not the name of a provider. "
            "Write names separated by commas, such as 'opweave_c,native'; 'name!' makes it an "
            "error if that provider cannot be used."
        )
    if bare in RENAMED:
        message = f"{origin}: provider {bare!r} is deprecated; use {RENAMED[bare]!r}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
    return Entry(RENAMED.get(bare, bare), name.strip().endswith("!"), origin)


def merge(lists: Iterable[Entries]) -> Entries:
    """Join lists, strongest first, into one: first mention wins, native last.

    Examples:
        >>> lists = parse("a,b", "scope"), parse("c,a", "platform default")
        >>> [entry.provider for entry in merge(lists)]
        ['a', 'b', 'c', 'native']
    """
    merged: dict[str, Entry] = {}
    for entry in (entry for entries in lists for entry in entries):
        merged.setdefault(entry.provider, entry)
    merged.setdefault(NATIVE, Entry(NATIVE, False, ALWAYS_LAST))
    return tuple(merged.values())


class IrOpPriorityConfig(Mapping[str, list[str]]):
    """Priority lists by op, any op: ``IrOpPriorityConfig(rms_norm=["triton", "native"])``.

    A mapping of op names to provider names; the key space is open, so an op that only a plugin
    declares gets its knob like any other. Names are checked against the registry when the config
    is applied.

    Examples:
        >>> IrOpPriorityConfig(rms_norm="opweave_c,native")["rms_norm"]
        ['opweave_c', 'native']
    """

    def __init__(
        self,
        priorities: Mapping[str, str | Iterable[str]] | None = None,
        /,
        **by_op: str | Iterable[str],
    ) -> None:
        given: dict[str, str | Iterable[str]] = {**(priorities or {}), **by_op}
        self._lists = {
            op: [str(entry) for entry in parse(names, f"IrOpPriorityConfig({op}=...)")]
            for op, names in given.items()
        }

    def __getitem__(self, op: str) -> list[str]:
        return self._lists[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lists)

    def __len__(self) -> int:
        return len(self._lists)

    def __repr__(self) -> str:
        lists = ", ".join(f"{op}={names!r}" for op, names in self._lists.items())
        return f"IrOpPriorityConfig({lists})"

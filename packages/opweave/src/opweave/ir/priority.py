"""Priorities: the order in which to try the providers of an op, and the setting behind each entry.

Sources, strongest first: call site, scope, command line, environment, config file,
``set_default``, tuning file, platform default, native. The list of a stronger source comes before
that of a weaker one; native is always last.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from opweave.ir.errors import SettingError
from opweave.ir.tunable import NAME

NATIVE = "native"
EVERY_OP = "*"
"""In a platform's default: the ops without a list of their own, where they have the provider."""
ALWAYS_LAST = "always last"  # origin of native if no list contains it


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
    TUNED = 6
    """A tuning file; it may choose by the number of tokens."""
    PLATFORM = 7
    """The default of the platform."""
    NATIVE = 8
    """The native implementation, always last."""


class PriorityEntry(NamedTuple):
    """One provider in a priority list.

    Attributes:
        provider: its name.
        strict: written as ``name!``: raise an error if it cannot be used, instead of falling back.
        origin: the setting it comes from, in the words of the user.
    """

    provider: str
    strict: bool
    origin: str

    def __str__(self) -> str:
        return f"{self.provider}!" if self.strict else self.provider


Entries = tuple[PriorityEntry, ...]

_COMMA = re.compile(r",(?![^\[]*\])")  # outside of brackets


class SizeRange(NamedTuple):
    """A priority list for calls with up to *limit* tokens; None: any number of tokens."""

    limit: int | None
    entries: Entries


def parse(providers: str | Iterable[str], origin: str) -> Entries:
    """Parse a priority list, given as an iterable of names or as one comma-separated string.

    Examples:
        >>> [str(entry) for entry in parse("triton!, opweave_c", "the command line")]
        ['triton!', 'opweave_c']

    Raises:
        SettingError: the list is empty or malformed.
    """
    if not isinstance(providers, Iterable):
        raise SettingError(
            f"{origin}: {providers!r} is not a list of providers, such as ['opweave_c', 'native']."
        )
    names = _COMMA.split(providers) if isinstance(providers, str) else list(providers)
    entries = tuple(_entry(name, origin) for name in names)
    if not entries:
        raise SettingError(
            f"{origin}: the priority list is empty. Give at least one provider, such as 'native'."
        )
    return entries


def _entry(name: object, origin: str) -> PriorityEntry:
    if not isinstance(name, str):
        raise SettingError(
            f"{origin}: {name!r} is not the name of a provider. "
            "Give a list of names, such as ['opweave_c', 'native']."
        )
    bare = name.strip().removesuffix("!")
    if not NAME.fullmatch(bare):
        raise SettingError(
            f"{origin}: {name!r} is not the name of a provider. "
            "Separate names by commas, such as 'opweave_c,native'; 'name!' makes it an error if "
            "that provider cannot be used."
        )
    return PriorityEntry(bare, name.strip().endswith("!"), origin)


def merge(lists: Iterable[Entries]) -> Entries:
    """Merge lists, strongest first: the first mention of a provider wins, native is last.

    Examples:
        >>> lists = parse("a,b", "scope"), parse("c,a", "platform default")
        >>> [entry.provider for entry in merge(lists)]
        ['a', 'b', 'c', 'native']
    """
    merged: dict[str, PriorityEntry] = {}
    for entry in (entry for entries in lists for entry in entries):
        merged.setdefault(entry.provider, entry)
    merged.setdefault(NATIVE, PriorityEntry(NATIVE, False, ALWAYS_LAST))
    return tuple(merged.values())


class IrOpPriorityConfig(Mapping[str, list[str]]):
    """Priority lists by op name: ``IrOpPriorityConfig(rms_norm=["triton", "native"])``.

    A mapping of op names to provider names. Any op name is accepted, including ops that a plugin
    declares later; names are checked against the registry when the config is applied.

    Examples:
        >>> IrOpPriorityConfig(rms_norm="opweave_c,native")["rms_norm"]
        ['opweave_c', 'native']
        >>> config = IrOpPriorityConfig()
        >>> config.rms_norm = ["native"]
        >>> config
        IrOpPriorityConfig(rms_norm=['native'])
    """

    def __init__(
        self,
        priorities: Mapping[str, str | Iterable[str]] | None = None,
        /,
        **by_op: str | Iterable[str],
    ) -> None:
        self._lists: dict[str, list[str]]
        object.__setattr__(self, "_lists", {})
        for op, names in {**(priorities or {}), **by_op}.items():
            setattr(self, op, names)

    def __setattr__(self, op: str, names: str | Iterable[str]) -> None:
        entries = parse(names, f"IrOpPriorityConfig({op}=...)")
        self._lists[op] = [str(entry) for entry in entries]

    def __getattr__(self, op: str) -> list[str]:
        if op.startswith("_"):  # copy and pickle ask before there are lists
            raise AttributeError(op)
        found = self._lists.get(op)
        if found is None:
            raise AttributeError(f"no priority is set for an op {op!r}; set: {', '.join(self)}")
        return found

    def __getitem__(self, op: str) -> list[str]:
        return self._lists[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lists)

    def __len__(self) -> int:
        return len(self._lists)

    def __repr__(self) -> str:
        lists = ", ".join(f"{op}={names!r}" for op, names in self._lists.items())
        return f"IrOpPriorityConfig({lists})"

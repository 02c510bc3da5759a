"""Tables that other packages add to: options, variables, compiler passes, models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Generic, TypeVar

from opweave.base.owner import Owner, current_owner
from opweave.base.transaction import enter
from opweave.ir.errors import OpweaveError, UnknownError, did_you_mean

T = TypeVar("T")


class DuplicateNameError(OpweaveError, ValueError):
    """The name is taken."""


class UnknownNameError(UnknownError, LookupError):
    """Nothing is registered under the name."""


@dataclass(frozen=True)
class Entry(Generic[T]):
    """What is registered under a name, and by whom; None: by opweave, or the program itself."""

    value: T
    owner: Owner | None


class OpenRegistry(Generic[T]):
    """Things by name. A name is taken once, and remembers which plugin took it.

    A plugin that fails takes what it added with it.

    Args:
        noun: what the things are, for messages: ``"compiler pass"``.

    >>> passes = OpenRegistry[int]("compiler pass")
    >>> passes.add("fold", 1), passes["fold"], "fold" in passes
    (1, 1, True)
    """

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._entries: dict[str, Entry[T]] = {}

    def add(self, name: str, value: T) -> T:
        """Enter *value* under *name*, as the current owner's, and return it.

        Raises:
            DuplicateNameError: (a ValueError) the name is taken.
        """
        if name in self._entries:
            raise DuplicateNameError(
                f"{self.noun} {name!r} is {_by(self._entries[name].owner)} already, so "
                f"{_whose(current_owner())} cannot have that name. Choose another."
            )
        self._entries[name] = Entry(value, current_owner())
        enter(f"{self.noun} {name}", partial(self._entries.__delitem__, name))
        return value

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name].value
        except KeyError:
            raise UnknownNameError(
                f"unknown {self.noun} {name!r}. {did_you_mean(name, self._entries)}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Mapping[str, Entry[T]]:
        """What is registered, with its owners, in the order of registration."""
        return MappingProxyType(self._entries)


def _by(owner: Owner | None) -> str:
    return "opweave's or the program's" if owner is None else f"that of plugin {owner}"


def _whose(owner: Owner | None) -> str:
    return "another" if owner is None else f"that of plugin {owner}"

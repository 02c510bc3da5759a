"""Registries that other packages add to: options, variables, compiler passes, models."""

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
    """The name is not registered."""


@dataclass(frozen=True)
class RegistryEntry(Generic[T]):
    """A registered value and its owner; None for opweave or the program itself."""

    value: T
    owner: Owner | None


class OpenRegistry(Generic[T]):
    """Values by unique name, with the plugin that registered each.

    If a plugin fails, its registrations are undone.

    Args:
        noun: the kind of the values, for messages: ``"compiler pass"``.

    >>> passes = OpenRegistry[int]("compiler pass")
    >>> passes.add("fold", 1), passes["fold"], "fold" in passes
    (1, 1, True)
    """

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._entries: dict[str, RegistryEntry[T]] = {}

    def add(self, name: str, value: T) -> T:
        """Register *value* under *name* for the current owner, and return it.

        Raises:
            DuplicateNameError: (a ValueError) the name is taken.
        """
        if name in self._entries:
            raise DuplicateNameError(
                f"{self.noun} {name!r} is already registered by "
                f"{_shown(self._entries[name].owner)}, so {_shown(current_owner())} cannot use "
                "that name. Choose another."
            )
        self._entries[name] = RegistryEntry(value, current_owner())
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
    def entries(self) -> Mapping[str, RegistryEntry[T]]:
        """The entries by name, in the order of registration."""
        return MappingProxyType(self._entries)


def _shown(owner: Owner | None) -> str:
    return "opweave or the program" if owner is None else f"plugin {owner}"

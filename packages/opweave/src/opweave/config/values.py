"""Configuration values: their checks, their origin, and their form as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar

from opweave.ir.errors import OpweaveError, SettingError, UnknownError, did_you_mean
from opweave.registration import Owner, current_owner
from opweave.transaction import enter

# Checks of configuration values.


def check_count(owner: str, name: str, value: object, note: str = "") -> None:
    """Raise :class:`SettingError` unless *value* is a positive integer; *note* ends the message."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(f"{owner}: {name}={value!r} must be a positive integer{note}.")


def api_key_fault(key: str) -> str | None:
    """Return why *key* cannot be sent in an HTTP header, or None."""
    if key.isascii() and key.isprintable() and " " not in key:
        return None
    return (
        "An API key contains characters that cannot be sent in an HTTP header; use printable ASCII "
        "characters without spaces."
    )


def check_flag(owner: str, name: str, value: object) -> None:
    """Raise :class:`SettingError` unless *value* is True or False."""
    if not isinstance(value, bool):
        raise SettingError(f"{owner}: {name}={value!r} must be True or False.")


def check_seconds(owner: str, name: str, value: object) -> None:
    """Raise :class:`SettingError` unless *value* is a positive, finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):  # type: ignore[operator]
        raise SettingError(f"{owner}: {name}={value!r} must be a positive number of seconds.")


def check_share(owner: str, name: str, value: object) -> None:
    """Raise :class:`SettingError` unless *value* is above 0 and at most 1."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1:  # type: ignore[operator]
        raise SettingError(f"{owner}: {name}={value!r} must be a number above 0, and at most 1.")


def check_choice(owner: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise :class:`SettingError` unless *value* is one of *choices*."""
    if value not in choices:
        hint = did_you_mean(str(value), choices).partition("Known:")[0]  # choices are listed below
        raise SettingError(
            f"{owner}: {name}={value!r} must be one of {', '.join(choices)}. {hint}".rstrip()
        )


# Mappings that may be given as JSON text on the command line.


def read_object(name: str, value: object) -> dict[str, Any]:
    """Return *value* as a dict.

    Args:
        name: its name in messages.
        value: a mapping, or the text of a JSON object.

    Raises:
        SettingError: (a ValueError) it is neither, or a key is not a string.

    >>> read_object("options", '{"fusion": false}')
    {'fusion': False}
    """
    found = _parsed(name, value) if isinstance(value, str) else value
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise SettingError(
            f'{name}={value!r} must be a mapping or a JSON object, such as {{"fusion": false}}.'
        )
    return dict(found)


def _parsed(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingError(
            f'{name}={text!r} is not a JSON object, such as {{"fusion": false}}: {error}.'
        ) from error


# Typed values of plugin settings, parsed from text: bool, int, float or str.


KINDS = (bool, int, float, str)
TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off", ""})


def check_kind(where: str, kind: type, default: object) -> None:
    """Raise :class:`SettingError` unless *kind* is supported and *default* is of that type."""
    names = ", ".join(each.__name__ for each in KINDS)
    if kind not in KINDS:
        raise SettingError(f"{where}: kind={kind!r} must be one of {names}.")
    if not _is(kind, default):
        raise SettingError(f"{where}: default={default!r} must be of type {kind.__name__}.")


def read(where: str, kind: type, value: object) -> Any:
    """Return *value* as *kind*: parsed if it is text, or unchanged if it has the type.

    >>> read("--plugin.acme.depth", int, "8"), read("ACME_FAST", bool, "yes")
    (8, True)

    Raises:
        SettingError: it is malformed; the message starts with *where*.
    """
    if _is(kind, value):
        return value
    found = _from_text(kind, value.strip()) if isinstance(value, str) else None
    if found is None:
        raise SettingError(f"{where}={value!r} must be {_WANTED[kind]}.")
    return found


def _is(kind: type, value: object) -> bool:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return True
    return type(value) is kind


def _from_text(kind: type, text: str) -> Any:
    if kind is bool:
        lower = text.lower()
        return lower in TRUE if lower in TRUE | FALSE else None
    try:
        return kind(text)
    except ValueError:
        return None


_WANTED = {
    bool: "true (1) or false (0)",
    int: "an integer",
    float: "a number",
    str: "a string",
}


# Base class of configurations, which records the origin of each value.


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a value.

    Attributes:
        source: the setting, in the words of the user: ``"--compilation-config.mode"``, ``"platform
            acme"``.
        value: the value.
        reason: why, if a platform set it.
        by_user: whether the user set it, so that platforms need ``force`` to change it.
    """

    source: str
    value: Any
    reason: str = ""
    by_user: bool = True

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}" if self.reason else self.source


DEFAULT = "default"
_GIVEN = "given"


class _Recording(type):
    """Metaclass of :class:`Config`: records which values were given at construction."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        names = made.names()
        passed, before = {*names[: len(args)], *kwargs}, made.origins
        # dataclasses.replace passes all values, including the origins.
        is_copy = "origins" in kwargs
        for name in names:
            value, old = getattr(made, name), before.get(name)
            if old is not None and _same(old.value, value):
                continue
            given = name in passed and not (is_copy and made._is_default(name, value))
            made._set_origin(name, Origin(_GIVEN, value) if given else None)
        return made


@dataclass(frozen=True)
class Config(metaclass=_Recording):
    """Base class of configurations: frozen dataclasses that record the origin of each value.

    Attributes:
        origins: origins of non-default values by name; ``dataclasses.replace`` keeps them.
    """

    origins: Mapping[str, Origin] = field(
        default_factory=dict, kw_only=True, compare=False, repr=False
    )

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the values."""
        return [each.name for each in fields(cls) if each.init and each.name != "origins"]

    def origin(self, name: str) -> Origin:
        """Return the origin of the value called *name*."""
        return self.origins.get(name) or Origin(DEFAULT, getattr(self, name), by_user=False)

    def with_values(self, values: Mapping[str, Origin]) -> Self:
        """Return a copy with the values of these origins.

        Raises:
            SettingError: a value is malformed, or does not fit the others.
        """
        changed = replace(self, **{name: origin.value for name, origin in values.items()})
        for name, origin in values.items():
            # The typed value, which may differ from the given one.
            kept = replace(origin, value=getattr(changed, name))
            changed._set_origin(name, kept)
        return changed

    def _is_default(self, name: str, value: object) -> bool:
        each = next(each for each in fields(self) if each.name == name)
        if each.default_factory is not MISSING:
            return _same(value, each.default_factory())
        return each.default is not MISSING and _same(value, each.default)

    def _set_origin(self, name: str, origin: Origin | None) -> None:
        found = {each: old for each, old in self.origins.items() if each != name}
        if origin is not None:
            found[name] = origin
        object.__setattr__(self, "origins", found)


def _same(one: object, other: object) -> bool:
    return one is other or bool(one == other)


# Registries that other packages add to: options, variables, compiler passes, models.


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

    If a plugin fails, its registrations are taken back.

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
        enter(f"{self.noun} {name}", self._entries, name, RegistryEntry(value, current_owner()))
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

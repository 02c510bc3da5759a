"""Configuration values: their checks, their origin, and their form as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar

from opweave.ir.errors import OpweaveError, SettingError, UnknownError, did_you_mean
from opweave.registration import Owner, current_owner
from opweave.transaction import enter

# Checks of configuration values, declared with the fields of a configuration.


@dataclass(frozen=True)
class ValueCheck:
    """A condition of a value.

    Attributes:
        accepts: whether it accepts a value.
        expected: the accepted values, for messages.
        choices: the accepted strings, if there are only a few.
    """

    accepts: Callable[[Any], bool]
    expected: str
    choices: Sequence[str] = ()

    def __call__(self, owner: str, name: str, value: object) -> None:
        """Raise :class:`SettingError` unless *value* is accepted."""
        if self.accepts(value):
            return
        hint = did_you_mean(str(value), self.choices).partition("Known:")[0]  # they are listed
        raise SettingError(f"{owner}: {name}={value!r} must be {self.expected}. {hint}".rstrip())


def _is_number(value: object, kind: type | tuple[type, ...] = (int, float)) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


COUNT = ValueCheck(lambda v: _is_number(v, int) and v >= 1, "a positive integer")
FLAG = ValueCheck(lambda v: isinstance(v, bool), "True or False")
SECONDS = ValueCheck(
    lambda v: _is_number(v) and 0 < v < float("inf"), "a positive number of seconds"
)
SHARE = ValueCheck(lambda v: _is_number(v) and 0 < v <= 1, "a number above 0, and at most 1")


def one_of(*choices: str) -> ValueCheck:
    """Return a check that accepts *choices*."""
    return ValueCheck(lambda v: v in choices, f"one of {', '.join(choices)}", choices)


def checked(check: ValueCheck, default: Any) -> Any:
    """Declare a field of a :class:`Config`; None is accepted if it is the default."""
    if default is None:
        accepts, text = check.accepts, f"{check.expected}, or None"
        check = ValueCheck(lambda v: v is None or accepts(v), text)
    return field(default=default, metadata={"check": check})


def api_key_fault(key: str) -> str | None:
    """Return why *key* cannot be sent in an HTTP header, or None."""
    if key.isascii() and key.isprintable() and " " not in key:
        return None
    return (
        "An API key contains characters that cannot be sent in an HTTP header; use printable ASCII "
        "characters without spaces."
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
    form = 'JSON object, such as {"fusion": false}'
    found = parsed(name, value, form) if isinstance(value, str) else value
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise SettingError(f"{name}={value!r} must be a mapping or a {form}.")
    return dict(found)


def parsed(name: str, text: str, form: str) -> Any:
    """Return the value of the JSON *text*.

    Raises:
        SettingError: it is not JSON; the message says that it should be a *form*.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingError(f"{name}={text!r} is not a {form}: {error}.") from error


# Typed values of plugin settings, parsed from text: bool, int, float or str.


TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off", ""})


def check_kind(where: str, kind: type, default: object) -> None:
    """Raise :class:`SettingError` unless *kind* is supported and *default* is of that type."""
    if kind not in _DESCRIPTIONS:
        names = ", ".join(supported.__name__ for supported in _DESCRIPTIONS)
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
        raise SettingError(f"{where}={value!r} must be {_DESCRIPTIONS[kind]}.")
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


_DESCRIPTIONS = {
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


@dataclass(frozen=True)
class Config:
    """Base class of configurations: frozen dataclasses that record the origin of each value.

    Attributes:
        origins: origins by name; ``dataclasses.replace`` keeps them. Without one, a value that
            differs from its default is the user's.
    """

    origins: Mapping[str, Origin] = field(
        default_factory=dict, kw_only=True, compare=False, repr=False
    )

    def __new__(cls, *args: Any, **values: Any) -> Self:
        config = super().__new__(cls)
        if "origins" not in values:  # dataclasses.replace passes every value, and the origins
            config.__dict__["_passed"] = [*cls.names()[: len(args)], *values]
        return config

    def __post_init__(self) -> None:
        passed = self.__dict__.pop("_passed", ())  # a default that the user passes is the user's
        given = {name: Origin(_GIVEN, getattr(self, name)) for name in passed}
        object.__setattr__(self, "origins", {**given, **self.origins})
        for item in fields(self):
            if (check := item.metadata.get("check")) is not None:
                check(type(self).__name__, item.name, getattr(self, item.name))

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the values."""
        return [item.name for item in fields(cls) if item.init and item.name != "origins"]

    def origin(self, name: str) -> Origin:
        """Return the origin of the value called *name*."""
        value, recorded = getattr(self, name), self.origins.get(name)
        if recorded is not None and _same(recorded.value, value):
            return recorded
        is_default = self._is_default(name, value)
        return Origin(DEFAULT if is_default else _GIVEN, value, by_user=not is_default)

    def with_values(self, values: Mapping[str, Origin]) -> Self:
        """Return a copy with the values of these origins.

        Raises:
            SettingError: a value is malformed, or does not fit the others.
        """
        changed = replace(self, **{name: origin.value for name, origin in values.items()})
        # The typed values, which may differ from the given ones.
        typed = {n: replace(origin, value=getattr(changed, n)) for n, origin in values.items()}
        return replace(changed, origins={**self.origins, **typed})

    def _is_default(self, name: str, value: object) -> bool:
        item = next(item for item in fields(self) if item.name == name)
        if item.default_factory is not MISSING:
            return _same(value, item.default_factory())
        return item.default is not MISSING and _same(value, item.default)


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

"""Where each value of a configuration comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Origin:
    """Who set a value.

    Attributes:
        source: as a user would recognise it: ``"--compilation-config.mode"``, ``"platform acme"``.
        value: what it was set to.
        reason: why, where a platform set it.
        by_user: the user asked for it, so that no platform may change it in passing.
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
    """Makes objects that know which of their values were given, and which are defaults."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        names = made.names()
        passed, before = {*names[: len(args)], *kwargs}, made.origins
        # dataclasses.replace passes every value, and with them where they came from.
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
    """Base class of configurations: frozen dataclasses that know where each value comes from.

    Attributes:
        origins: of the values that are not defaults, by name; ``dataclasses.replace`` keeps them.
    """

    origins: Mapping[str, Origin] = field(
        default_factory=dict, kw_only=True, compare=False, repr=False
    )

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the values."""
        return [each.name for each in fields(cls) if each.init and each.name != "origins"]

    def origin(self, name: str) -> Origin:
        """Return where the value of that name comes from."""
        return self.origins.get(name) or Origin(DEFAULT, getattr(self, name), by_user=False)

    def with_values(self, values: Mapping[str, Origin]) -> Self:
        """Return a copy with these values, from these origins.

        Raises:
            SettingError: a value is malformed, or does not fit the others.
        """
        changed = replace(self, **{name: origin.value for name, origin in values.items()})
        for name, origin in values.items():
            # The typed value, which is not always what was written.
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

"""Base class of configurations, which records the origin of each value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Self


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

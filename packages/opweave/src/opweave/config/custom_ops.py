"""The list of enabled ``CustomOp`` ops: ``all``, ``none``, ``+op`` and ``-op``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Self

from opweave.ir.errors import SettingError

_BASES = ("all", "none")


class CustomOps(tuple[str, ...]):
    """A complete list of enabled ops, with ``all`` or ``none`` exactly once.

    Attributes:
        given: the user's list, without the appended default.

    >>> ops = CustomOps.parse("+rms_norm,-silu_and_mul", default="all")
    >>> ops, ops.enables("rms_norm"), ops.enables("silu_and_mul"), ops.enables("relu2")
    (('+rms_norm', '-silu_and_mul', 'all'), True, False, True)
    """

    given: tuple[str, ...]

    @classmethod
    def parse(cls, value: object, *, default: str) -> Self:
        """Parse a list, a comma-separated string, or a JSON list.

        Items of a list may be comma-separated too. In op names, ``-`` and ``_`` are equivalent.

        Raises:
            SettingError: (a ValueError) an item is not ``all``, ``none``, ``+op`` or ``-op``;
                ``all`` and ``none`` occur more than once; or an op is both enabled and disabled.
        """
        given = value.given if isinstance(value, CustomOps) else tuple(_tokens(value))
        bases = [token for token in given if token in _BASES]
        if len(bases) > 1:
            raise SettingError(
                f"custom_ops {list(given)!r} contains {' and '.join(map(repr, bases))}. Give 'all' "
                "or 'none' once."
            )
        both = sorted(_named(given, "+") & _named(given, "-"))
        if both:
            raise SettingError(
                f"custom_ops {list(given)!r} both enables and disables {', '.join(both)}. Keep "
                f"'+{both[0]}' or '-{both[0]}'."
            )
        ops = cls(given if bases else (*given, default))
        ops.given = given
        return ops

    @property
    def default_on(self) -> bool:
        """Whether ops are enabled that are not in the list."""
        return "all" in self

    @property
    def named(self) -> frozenset[str]:
        """The ops in the list."""
        return _named(self, "+") | _named(self, "-")

    def enables(self, name: str | None) -> bool:
        """Whether the op is enabled; *name* is its registered name, if it has one."""
        if f"-{name}" in self:
            return False
        return self.default_on or f"+{name}" in self


def _tokens(value: object) -> Iterable[str]:
    if isinstance(value, str):
        items = _from_json(value) if value.strip().startswith("[") else [value]
    elif isinstance(value, Iterable):
        items = list(value)
    else:
        items = [value]
    for item in items:
        if not isinstance(item, str):
            raise SettingError(
                f"custom_ops {value!r} should be a list of strings, such as ['none', '+rms_norm']."
            )
        if item.strip():
            yield from map(_token, item.split(","))


def _token(written: str) -> str:
    token = written.strip()
    token = token[:1] + token[1:].replace("-", "_")
    if token in _BASES or (token[:1] in ("+", "-") and token[1:].isidentifier()):
        return token
    raise SettingError(f"custom_ops: {written!r} must be 'all', 'none', '+op' or '-op'.")


def _from_json(text: str) -> list[object]:
    try:
        found: list[object] = json.loads(text)  # a list, because it starts with a bracket
    except json.JSONDecodeError as error:
        raise SettingError(
            f'custom_ops {text!r} is not a JSON list, such as ["none", "+rms_norm"]: {error}.'
        ) from error
    return found


def _named(tokens: Iterable[str], sign: str) -> frozenset[str]:
    return frozenset(token[1:] for token in tokens if token.startswith(sign))

"""Which ops of ``CustomOp`` are enabled: ``all``, ``none``, ``+op`` and ``-op``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Self

from opweave.ir.errors import SettingError

_BASES = ("all", "none")


class CustomOps(tuple[str, ...]):
    """A list of what is enabled, complete: it says ``all`` or ``none`` exactly once.

    Attributes:
        given: what the user wrote, without the default that was appended.

    >>> ops = CustomOps.parse("+rms_norm,-silu_and_mul", default="all")
    >>> ops, ops.enables("rms_norm"), ops.enables("silu_and_mul"), ops.enables("relu2")
    (('+rms_norm', '-silu_and_mul', 'all'), True, False, True)
    """

    given: tuple[str, ...]

    @classmethod
    def parse(cls, value: object, *, default: str) -> Self:
        """Read a list, or a string: separated by commas, or a JSON list.

        Each item of a list may itself hold several, separated by commas. In the names of ops,
        ``-`` and ``_`` are alike.

        Raises:
            SettingError: (a ValueError) something is not ``all``, ``none``, ``+op`` or ``-op``;
                there are two of the former; or one op is both enabled and disabled.
        """
        given = value.given if isinstance(value, CustomOps) else tuple(_tokens(value))
        bases = [token for token in given if token in _BASES]
        if len(bases) > 1:
            raise SettingError(
                f"custom_ops {list(given)!r} says {' and '.join(map(repr, bases))}. Say 'all' or "
                "'none', once."
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
        """Whether ops are enabled that the list does not name."""
        return "all" in self

    @property
    def named(self) -> frozenset[str]:
        """The ops that the list names."""
        return _named(self, "+") | _named(self, "-")

    def enables(self, name: str | None) -> bool:
        """Say whether the op of that registered name, if it has one, is enabled."""
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
        found: list[object] = json.loads(text)  # a list, by its first character
    except json.JSONDecodeError as error:
        raise SettingError(
            f'custom_ops {text!r} is no JSON list, such as ["none", "+rms_norm"]: {error}.'
        ) from error
    return found


def _named(tokens: Iterable[str], sign: str) -> frozenset[str]:
    return frozenset(token[1:] for token in tokens if token.startswith(sign))

"""Typed access to the JSON object of a ``config.json``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TypeVar

from opweave_engine.models.errors import InvalidConfigError, UnsupportedModelError

T = TypeVar("T")

_log = logging.getLogger(__name__)

_COUNT = "a positive integer below 2**63"  # which is what torch counts to
_NATURAL = "an integer from 0, below 2**63"
_NUMBER = "a finite positive number"
_SHOWN = 100  # characters of a value in an error


class Fields:
    """A JSON object whose values are checked when they are read.

    A missing or null key takes the default; without a default it is an error. *name* is the name of
    the object in error messages.
    """

    def __init__(self, values: object, name: str = "config.json") -> None:
        if not isinstance(values, Mapping):
            raise InvalidConfigError(f"{name} must hold a JSON object, not {_shown(values)}.")
        self.values, self.name = values, name

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self._value(key, default, _COUNT)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
            raise self._wrong(key, value, _COUNT)
        return value

    def size(self, key: str, default: int) -> int:
        """Return a positive integer; an absent key takes the default, and null is an error."""
        return self.count(key, None if key in self.values else default)

    def natural(self, key: str, default: int | None = None) -> int:
        """Return an integer from 0."""
        value = self._value(key, default, _NATURAL)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise self._wrong(key, value, _NATURAL)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._value(key, default, _NUMBER)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, value, _NUMBER)
        if not 0 < value <= sys.float_info.max:
            raise self._wrong(key, value, _NUMBER)
        return float(value)

    def flag(self, key: str, default: bool, *, null: bool | None = None) -> bool:
        """Return a boolean; *null* is what null means, by default the same as an absent key."""
        if null is not None and key in self.values and key not in self:
            return null
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(key, default, "a string")
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings; empty if the key is absent."""
        value = self._value(key, [], "a list of strings")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of strings")
        return [*value]

    def nested(self, key: str) -> Fields:
        """Return a nested JSON object; empty if the key is absent."""
        return Fields(self._value(key, {}, "an object"), f"{key!r} in {self.name}")

    def dtype(self) -> str | None:
        """Return the name of the checkpoint's dtype; None if it does not say."""
        key = "dtype" if "dtype" in self else "torch_dtype"
        return self.text(key).removeprefix("torch.") if key in self else None

    def require(self, key: str, value: T, *supported: T) -> T:
        """Return *value* if it is supported; say what is, if not."""
        if value not in supported:
            known = ", ".join(map(str, supported))
            raise UnsupportedModelError(
                f"{self.name} has {key!r}: {_shown(value)}, which is not supported. "
                f"Supported: {known}."
            )
        return value

    def require_multiple(self, key: str, value: int, of: str, divisor: int) -> None:
        """Raise InvalidConfigError unless the *value* of *key* is a multiple of that of *of*."""
        if value % divisor:
            raise InvalidConfigError(
                f"{self.name} has {key!r}: {value}, which is not a multiple of {of!r}: {divisor}."
            )

    def require_finite(self) -> None:
        """Raise InvalidConfigError if a number, in a list too, is not finite or no float's."""
        for key, value in self.values.items():
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int | float) and not abs(number) <= sys.float_info.max:
                    raise self._wrong(key, value, "finite")

    def warn_unread(self, *read: str) -> None:
        """Log the keys, other than null ones, that are not in *read*: they have no effect."""
        unread = sorted(str(key) for key in self.values if key in self and key not in read)
        if unread:
            _log.warning("%s: unknown keys are ignored: %s", self.name, _shown(", ".join(unread)))

    def refuse_quantized(self) -> None:
        """Raise UnsupportedModelError if the checkpoint is quantized."""
        key = "quantization_config"
        found = self.values.get(key)
        if found in (None, {}):
            return
        method = found.get("quant_method") if isinstance(found, Mapping) else found
        raise UnsupportedModelError(
            f"{self.name} has {key!r}: quantized checkpoints (quant_method {_shown(method)}) are "
            "not supported; use unquantized weights."
        )

    def _value(self, key: str, default: object, kind: str) -> object:
        value = self.values.get(key)
        if value is None and default is None:
            raise InvalidConfigError(f"{self.name} lacks {key!r}; it must be {kind}.")
        return default if value is None else value

    def _wrong(self, key: str, value: object, kind: str) -> InvalidConfigError:
        return InvalidConfigError(f"{self.name} has {key!r}: {_shown(value)}; it must be {kind}.")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

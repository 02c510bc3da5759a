"""Typed access to the JSON object of a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from opweave.models.errors import InvalidConfigError, UnsupportedModelError

T = TypeVar("T")


class Fields:
    """A JSON object whose values are checked when they are read.

    A key that is absent or null takes the default; without a default it is an error. *name* says in
    errors which object this is.
    """

    def __init__(self, values: object, name: str = "config.json") -> None:
        if not isinstance(values, Mapping):
            raise InvalidConfigError(f"{name} must hold a JSON object, not {values!r}.")
        self.values, self.name = values, name

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self._value(key, default, "a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "a positive integer")
        return value

    def natural(self, key: str, default: int | None = None) -> int:
        """Return an integer from 0."""
        value = self._value(key, default, "an integer from 0")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(key, value, "an integer from 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._value(key, default, "a positive number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
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
                f"{self.name} has {key!r}: {value!r}, which is not supported. Supported: {known}."
            )
        return value

    def require_multiple(self, key: str, value: int, of: str, divisor: int) -> None:
        """Raise InvalidConfigError unless the *value* of *key* is a multiple of that of *of*."""
        if value % divisor:
            raise InvalidConfigError(
                f"{self.name} has {key!r}: {value}, which is not a multiple of {of!r}: {divisor}."
            )

    def refuse_quantized(self) -> None:
        """Raise UnsupportedModelError if the checkpoint is quantized."""
        self.require("quantization_config", self.values.get("quantization_config"), None)

    def _value(self, key: str, default: object, kind: str) -> object:
        value = self.values.get(key)
        if value is None and default is None:
            raise InvalidConfigError(f"{self.name} lacks {key!r}; it must be {kind}.")
        return default if value is None else value

    def _wrong(self, key: str, value: object, kind: str) -> InvalidConfigError:
        return InvalidConfigError(f"{self.name} has {key!r}: {value!r}; it must be {kind}.")

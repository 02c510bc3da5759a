"""Reads a ``quantization_config``: every key is known, and every value is supported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opweave_engine.models import UnsupportedModelError


class StrictConfig:
    """The object of a configuration.

    Args:
        config: the object.
        name: of the format, for errors.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name
        self._known: set[str] = set()

    def one_of(self, key: str, *supported: Any, default: Any = None) -> Any:
        """Return the value of *key*; absent and null mean *default*.

        Raises:
            UnsupportedModelError: it is not one of *supported*.
        """
        self._known.add(key)
        found = self.config.get(key)
        found = default if found is None else found
        if not any(found == value and type(found) is type(value) for value in supported):
            raise self.unsupported(f"{key}={found!r}", supported)
        return found

    def nested(self, key: str) -> StrictConfig:
        """Return the object *key*; absent and null are an empty one."""
        self._known.add(key)
        found = self.config.get(key)
        found = {} if found is None else found
        if not isinstance(found, Mapping):
            raise self.unsupported(f"{key}={found!r}", ("an object",))
        return StrictConfig(found, f"{self.name}, {key}")

    def allow(self, *keys: str) -> None:
        """Accept any value of *keys*: the tensors tell, or it means nothing to inference."""
        self._known |= {*keys}

    def refuse_set(self, key: str) -> None:
        """Refuse any value of *key* but an empty one."""
        self._known.add(key)
        if found := self.config.get(key):
            raise self.unsupported(f"{key}={found!r}", ("nothing",))

    def finish(self) -> None:
        """Refuse keys that were neither read nor allowed."""
        if unknown := sorted(self.config.keys() - self._known):
            raise self.unsupported(f"the key {unknown[0]!r}", ())

    def unsupported(self, what: str, supported: tuple[Any, ...]) -> UnsupportedModelError:
        """Return the error for a value."""
        known = f" Supported: {', '.join(map(repr, supported))}." if supported else ""
        return UnsupportedModelError(
            f"quantization_config ({self.name}) has {what[:200]}, which is not supported.{known}"
        )

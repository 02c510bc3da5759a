"""Mappings that may be given as JSON text on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from opweave.ir.errors import SettingError


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

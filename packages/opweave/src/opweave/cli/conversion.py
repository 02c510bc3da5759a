"""Conversion of option texts to values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from cyclopts import CoercionError, Token, convert

from opweave.cli.errors import CliError
from opweave.config.json_text import read_object


def converted(kind: Any, tokens: Sequence[Token]) -> Any:
    """Convert *tokens* to *kind*; unlike cyclopts, do not round fractions to an int.

    Raises:
        CoercionError: *tokens* are not valid for *kind*.
    """
    if int in (kind, *get_args(kind)):
        for token in tokens:
            if "." in token.value:
                raise CoercionError(token=token, target_type=int)
    return convert(kind, tokens)


def by_key(kind: Any, tokens: Mapping[str, Any] | Sequence[Token]) -> dict[str, Any]:
    """Return the values of ``--option.key=value`` by key, or of ``--option`` with a JSON object.

    Values of keys are strings; values of a JSON object keep their types.

    Raises:
        CliError: a key is nested.
        SettingError: (a ValueError) the text is not a JSON object.
    """
    if not isinstance(tokens, Mapping):
        return read_object("JSON", tokens[0].value)
    for key, given in tokens.items():
        if isinstance(given, Mapping):
            raise CliError(f"{key!r} takes one value, such as JSON, not nested keys: {[*given]}.")
    return {key: given[0].value for key, given in tokens.items()}

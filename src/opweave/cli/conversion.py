"""How the text of an option becomes its value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from cyclopts import CoercionError, Token, convert

from opweave.cli.errors import CliError
from opweave.config.json_text import read_object


def converted(kind: Any, tokens: Sequence[Token]) -> Any:
    """Return the value of *tokens* as *kind*; unlike cyclopts, no fraction is rounded to an int.

    Raises:
        CoercionError: they are none of *kind*.
    """
    if int in (kind, *get_args(kind)):
        for token in tokens:
            if "." in token.value:
                raise CoercionError(token=token, target_type=int)
    return convert(kind, tokens)


def by_key(kind: Any, tokens: Mapping[str, Any] | Sequence[Token]) -> dict[str, Any]:
    """Return what ``--option.key=value`` says, by key, or ``--option`` with a JSON object.

    The values of a JSON object are not only texts, as those of keys are: a list stays a list.

    Raises:
        CliError: a key has keys of its own.
        SettingError: (a ValueError) the text is no JSON object.
    """
    if not isinstance(tokens, Mapping):
        return read_object("JSON", tokens[0].value)
    for key, given in tokens.items():
        if isinstance(given, Mapping):
            raise CliError(f"{key!r} takes one value, which may be JSON, and no keys: {[*given]}.")
    return {key: given[0].value for key, given in tokens.items()}

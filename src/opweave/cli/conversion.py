"""How the text of an option becomes its value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from cyclopts import CoercionError, Token, convert


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

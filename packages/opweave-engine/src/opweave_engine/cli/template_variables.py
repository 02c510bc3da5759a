"""The option ``--chat-template-kwargs.<name>=value``, or ``--chat-template-kwargs`` and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter, Token

from opweave.cli.conversion import by_key


def _variables(kind: Any, tokens: Mapping[str, Any] | Sequence[Token]) -> dict[str, Any]:
    return {name: _value(value) for name, value in by_key(kind, tokens).items()}


def _value(given: Any) -> Any:
    """Parse JSON; return other text unchanged."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


TemplateVariables = Annotated[
    dict[str, Any] | None,
    Parameter(
        name=("--chat-template-kwargs", "--chat_template_kwargs"),
        negative=(),
        converter=_variables,
        allow_leading_hyphen=True,  # for negative numbers
        help="Variables of the chat template: --chat-template-kwargs.enable_thinking=false, or all "
        "in one JSON object.",
    ),
]

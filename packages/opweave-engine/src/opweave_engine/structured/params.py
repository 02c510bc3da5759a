"""Parameters of structured output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opweave_engine.errors import SamplingParamsError
from opweave_engine.structured.limits import check_limits, too_deep

NAME = "structured_outputs"  # the sampling parameter that holds the constraint
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutputsParams:
    r"""A constraint on an answer; set exactly one of the first five fields.

    Attributes:
        json: a JSON schema, as a dict or as JSON text.
        json_object: any JSON object.
        regex: a regular expression that the whole answer matches; without look-around and
            backreferences. As with ``re.ASCII``, ``\d``, ``\w`` and ``\s`` are ASCII.
        choice: the answer is one of these texts.
        grammar: a context-free grammar in Lark or GBNF notation, or in llguidance's JSON.
        disable_any_whitespace: forbid optional whitespace in JSON.
        whitespace_pattern: a regular expression for the optional whitespace in JSON.
        disable_additional_properties: allow only properties that are in the schema, as with
            ``"additionalProperties": false``.

    Raises:
        SamplingParamsError: no field or several are set, or a value has the wrong type or exceeds
            a limit.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = self._given
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise _error(f"needs exactly one of {', '.join(_KINDS)}; got {found}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if (value := getattr(self, name)) is not None and not (
                isinstance(value, str) and value
            ):
                raise _error(f"{name}={value!r} must be a string that is not empty")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name) not in (None, True, False):
                raise _error(f"{name}={getattr(self, name)!r} must be True or False")
        self._check_choice()
        if self.json is not None:
            self._check_schema()
        try:
            check_limits({**vars(self), "json": None if self.json is None else self.schema})
        except ValueError as error:
            raise _error(str(error)) from error

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return self._given[0]

    @property
    def _given(self) -> list[str]:
        absent = {"json_object": (None, False)}  # False is a JSON schema, which nothing satisfies
        return [name for name in _KINDS if getattr(self, name) not in absent.get(name, (None,))]

    @property
    def schema(self) -> Mapping[str, Any] | bool:
        """The JSON schema as an object."""
        found: Mapping[str, Any] | bool = (
            json.loads(self.json) if isinstance(self.json, str) else self.json  # type: ignore[assignment]
        )
        return found

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        if (
            not isinstance(self.choice, list | tuple)
            or not self.choice
            or not all(isinstance(text, str) for text in self.choice)
        ):
            raise _error(f"choice={self.choice!r} must be a list of one or more strings")
        object.__setattr__(self, "choice", tuple(self.choice))

    def _check_schema(self) -> None:
        try:
            schema = self.schema
            json.dumps(schema)
        except RecursionError as error:
            raise _error(too_deep("json")) from error
        except (ValueError, TypeError) as error:
            raise _error(f"json is not valid JSON: {error}") from error
        if not isinstance(schema, Mapping | bool):
            raise _error(f"json={self.json!r} must be a JSON schema, which is an object")


def _error(problem: str) -> SamplingParamsError:
    return SamplingParamsError(f"{NAME}: {problem}.", NAME)

"""Structured output options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from opweave.cli.errors import CliError

if TYPE_CHECKING:
    from opweave_engine import StructuredOutputsParams


def structured_outputs(
    json_schema: str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> StructuredOutputsParams | None:
    """Return the structured output parameters, or None without such options.

    Args:
        json_schema: a file name, or the schema itself.
        regex: a regular expression.
        choice: the possible answers.
        grammar: a file name, or the grammar itself.

    Raises:
        CliError: several options are given, or a file cannot be read.
        SamplingParamsError: the value is not valid.
    """
    from opweave_engine import StructuredOutputsParams

    options = {
        "--json-schema": json_schema,
        "--regex": regex,
        "--choice": choice,
        "--grammar": grammar,
    }
    given = [name for name, value in options.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        raise CliError(f"{' and '.join(given)} are mutually exclusive; give one of them.")
    return StructuredOutputsParams(
        json=_read("--json-schema", json_schema, "{"),
        regex=regex,
        choice=choice,
        grammar=_read("--grammar", grammar, "\n", "::=", "start:"),
    )


def _read(option: str, value: str | None, *marks: str) -> str | None:
    """Return *value* if it has one of *marks*, which file names do not; else the file's text."""
    if value is None or any(mark in value for mark in marks):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CliError(f"{option} {value!r} is not UTF-8: {error}.") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CliError(f"{option} {value!r} cannot be read: {why}.") from error

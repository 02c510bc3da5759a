"""Validation of prompts from the command line."""

from __future__ import annotations

from opweave.cli.errors import CliError


def check_utf8(text: str) -> None:
    """Raise CliError if *text* has surrogates, which stand for bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CliError(f"The prompt {text!a} is not UTF-8 text.") from error

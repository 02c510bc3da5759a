"""Prompts as they come from the command line."""

from __future__ import annotations

from opweave.cli.errors import CliError


def check_utf8(text: str) -> None:
    """Raise CliError if *text* holds bytes that were no UTF-8 when Python read them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CliError(f"The prompt {text!a} is not UTF-8 text.") from error

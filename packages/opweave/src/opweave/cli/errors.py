"""Errors of user input."""


class CliError(Exception):
    """The input of a command is not valid; the message is the line that the user sees."""

"""What can be wrong with what a user typed."""


class CliError(Exception):
    """The input of a command is no good; the message is the one line that the user sees."""

"""The command-line application: its commands and error handling."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import torch
from cyclopts import App, CycloptsError, Parameter, UnknownOptionError

from opweave import __version__
from opweave.cli import output
from opweave.cli.companions import add_commands, option_hint
from opweave.cli.options import converted
from opweave.config.environment import logging_level
from opweave.ir.errors import OpweaveError, described, notes

app = App(
    name="opweave",
    help="Run models on the kernels you choose, and see which ones run and why.",
    version=__version__,
    help_format="plaintext",
    console=output.Results(),
    default_parameter=Parameter(converter=converted),
)
# Commands are imported when they run, so that the server starts without their dependencies.
COMMANDS = {
    "explain": "opweave.cli.explain:explain",
    "ops": "opweave.cli.ops:ops",
    "doctor": "opweave.cli.doctor:doctor",
    "bench": "opweave.cli.bench:bench",
    "new": "opweave.cli.new:new",
    "native": "opweave.cli.native:native",
    "plugins": "opweave.cli.plugins:plugins",
    "verify": "opweave.cli.verify:verify_command",
    "record": "opweave.cli.record:record",
    "replay": "opweave.cli.record:replay",
    "tune": "opweave.cli.record:tune",
}
for _name, _place in COMMANDS.items():
    app.command(_place, name=_name)
add_commands(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 (problem found), 2 (bad input) or 130 (interrupted)."""
    try:
        output.open_streams()
        output.format_warnings()
        given = sys.argv[1:] if arguments is None else arguments
        if not given or given[0] in app.help_flags:
            app.resolved_commands()  # help shows a summary of each
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except UnknownOptionError as error:
        output.fail(_unknown_option(error))
    except CycloptsError as error:
        output.fail(_with_help(error))
    except (output.CliError, OpweaveError, torch.OutOfMemoryError) as error:
        output.fail(f"{error}{notes(error)}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        output.discard_output()
        sys.exit(0)
    except OSError as error:
        if not _is_of_output(error):
            output.fail(f"{str(error) or type(error).__name__}{notes(error)}")
        output.discard_output()
        output.fail(f"Cannot write the output: {error.strerror or error}.")
    except Exception as error:  # from a plugin's code, or a bug in opweave
        if logging_level() == "DEBUG":
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        output.show_error(
            f"{described(error, 1)} (at {where.filename}:{where.lineno}). "
            "OPWEAVE_LOGGING_LEVEL=DEBUG shows the traceback."
        )
        sys.exit(1)
    sys.exit(code or 0)


def _unknown_option(error: UnknownOptionError) -> str:
    option = error.token.keyword or error.token.value
    command = ".".join(error.command_chain or ())
    if (hint := option_hint(command, option)) is not None:
        return f"Unknown option: {option.partition('=')[0]}. {hint}"
    return _with_help(error)


def _with_help(error: CycloptsError) -> str:
    return f"{error} Try: {' '.join(('opweave', *(error.command_chain or ())))} --help"


def _is_of_output(error: OSError) -> bool:
    """Return whether *error* comes from writing to a standard stream, which has no file name.

    Streams are written in C, so the innermost frame belongs to the caller: opweave or rich.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return error.filename is None and module.startswith(("opweave.cli.", "rich."))

"""The command-line application: its commands, and what happens to errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
from cyclopts import App, CycloptsError

from opweave import __version__
from opweave.cli.bench import bench
from opweave.cli.chat import chat
from opweave.cli.doctor import doctor
from opweave.cli.errors import CliError
from opweave.cli.explain import explain
from opweave.cli.generate import generate
from opweave.cli.migrate import migrate
from opweave.cli.native import native
from opweave.cli.ops import ops
from opweave.cli.output import Results, fail, open_streams
from opweave.cli.plugins import plugins
from opweave.cli.serve import serve_app
from opweave.cli.verify import verify_command
from opweave.ir.errors import OpweaveError

app = App(
    name="opweave",
    help="Run models on the kernels you choose, and see which ones run and why.",
    version=__version__,
    help_format="plaintext",
    console=Results(),
)
for _command in (generate, chat, explain, ops, migrate, doctor):
    app.command(_command)
app.command(bench)
app.command(native)
app.command(serve_app)
app.command(plugins)
app.command(verify_command, name="verify")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 (problem found), 2 (bad input) or 130 (interrupted)."""
    try:
        open_streams()
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except CycloptsError as error:
        fail(f"{error} Try: opweave --help")
    except (CliError, OpweaveError, torch.OutOfMemoryError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        _discard_output()
        sys.exit(0)
    except OSError as error:
        if error.filename is not None:
            raise  # not about our output
        _discard_output()
        fail(f"Cannot write the output: {error.strerror}.")
    sys.exit(code or 0)


def _discard_output() -> None:
    """Keep Python from complaining, when it exits, about output that cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

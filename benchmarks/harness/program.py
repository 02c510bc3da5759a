"""How a benchmark ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from opweave.cli.output import discard_output


def run(main: Callable[[], int]) -> NoReturn:
    """Run a benchmark and exit, with 130 after Ctrl-C, and quietly where nobody reads on."""
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        discard_output()
        code = 0
    sys.exit(code)

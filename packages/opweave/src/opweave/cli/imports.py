"""The option ``--import MODULE``, for modules that register ops and implementations."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from typing import Annotated

from cyclopts import Parameter

from opweave.conformance.modules import import_named

ImportOption = Annotated[
    list[str] | None,
    Parameter(
        name="--import",
        negative=(),
        help="Import this module first, to register ops, implementations or layers; "
        "repeatable. The current directory is searched too.",
    ),
]


def import_modules(names: Iterable[str] | None) -> None:
    """Import modules by name, with the current directory last on sys.path.

    Raises:
        OpweaveError: a module is missing or fails to import.
    """
    sys.path.append(os.getcwd())
    with redirect_stdout(sys.stderr):  # stdout is for results only
        for name in names or ():
            import_named("--import", name)

"""Progress bars on stderr."""

from __future__ import annotations

from opweave.cli.output import err
from opweave.config.progress import ProgressBar


def progress_bar(what: str, *, then: str = "", counts: bool = True) -> ProgressBar:
    """Return a transient progress bar on stderr."""
    return ProgressBar(what, then=then, counts=counts, console=err)

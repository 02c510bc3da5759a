"""Progress bars on stderr."""

from __future__ import annotations

from opweave.cli.output import err
from opweave.config import EngineConfig
from opweave.config.progress import ProgressBar


def progress_bar(what: str, *, then: str = "", counts: bool = True) -> ProgressBar:
    """Return a transient progress bar on stderr."""
    return ProgressBar(what, then=then, counts=counts, console=err)


def loading_bar(config: EngineConfig) -> ProgressBar:
    """Return the bar of an engine that is loading."""
    from opweave_engine.loading.progress import after_loading

    return progress_bar("loading", then=after_loading(config))

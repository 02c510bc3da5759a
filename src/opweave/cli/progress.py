"""Progress bars on stderr."""

from __future__ import annotations

from opweave.cli.output import err
from opweave.config import EngineConfig, progress


class ProgressBar(progress.ProgressBar):
    """A transient progress bar on stderr."""

    def __init__(self, what: str, *, then: str = "", counts: bool = True) -> None:
        super().__init__(what, then=then, counts=counts, console=err)


def loading_bar(config: EngineConfig) -> ProgressBar:
    """Return the bar of an engine that is loading."""
    from opweave.engine.loading.progress import after_loading

    return ProgressBar("loading", then=after_loading(config))

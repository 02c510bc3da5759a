"""Progress on stderr, where somebody looks at it."""

from __future__ import annotations

from opweave.cli.output import err
from opweave.config import EngineConfig, progress


class ProgressBar(progress.ProgressBar):
    """A bar on stderr that goes away when it is done."""

    def __init__(self, what: str, *, then: str = "", counts: bool = True) -> None:
        super().__init__(what, then=then, counts=counts, console=err)


def loading_bar(config: EngineConfig) -> ProgressBar:
    """Return the bar of an engine that starts."""
    from opweave.engine.loading.progress import after_loading

    return ProgressBar("loading", then=after_loading(config))

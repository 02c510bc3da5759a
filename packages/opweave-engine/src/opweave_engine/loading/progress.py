"""Progress as whoever calls an engine wants to have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opweave.config import EngineConfig
from opweave.config.current import current_compilation_config
from opweave_engine.loading.checkpoint import Progress


@contextmanager
def reporting(
    progress: Progress | bool | None, what: str, then: str = ""
) -> Iterator[Progress | None]:
    """Yield what to call: *progress*; a bar on standard error, if that is True; or nothing."""
    if progress is not True:
        yield progress or None
        return
    from opweave.config.progress import ProgressBar

    with ProgressBar(what, then=then) as bar:
        yield bar


def after_loading(config: object) -> str:
    """Return what an engine of that configuration does when its model is loaded."""
    given = config.compilation if isinstance(config, EngineConfig) else None
    compilation = given or current_compilation_config()
    return "compiling" if compilation.compiles else "warming up"

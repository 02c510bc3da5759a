"""Shows the log on standard error, where a setting asks for it."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at the time of writing."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


_handler = _StandardError()


def show_log(level: str | None) -> None:
    """Write what the loggers below ``opweave`` say, from *level* up, to standard error.

    They no longer speak to the handlers of the root logger then: each line appears once. With None,
    nothing changes; the program decides what is shown, as with any library.
    """
    if level is None:
        return
    logger = logging.getLogger("opweave")
    logger.setLevel(level)
    logger.addHandler(_handler)  # once, however often
    logger.propagate = False

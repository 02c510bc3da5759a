"""The logger of the package; ``OPWEAVE_LOGGING_LEVEL=DEBUG`` shows what it says."""

from __future__ import annotations

import logging

logger = logging.getLogger("opweave.compile")

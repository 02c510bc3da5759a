"""The package logger. Set ``OPWEAVE_LOGGING_LEVEL=DEBUG`` to see its debug messages."""

from __future__ import annotations

import logging

logger = logging.getLogger("opweave.compile")

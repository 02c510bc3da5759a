"""Errors in the cache's bookkeeping, which are bugs of the engine."""

from __future__ import annotations

from opweave_engine.errors import EngineError


class CacheIntegrityError(EngineError):
    """Blocks are owned twice, lost, or counted wrongly."""

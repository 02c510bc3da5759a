"""What is wrong with a cache's bookkeeping: a defect of the engine, not of its user."""

from __future__ import annotations

from opweave.engine.errors import EngineError


class CacheIntegrityError(EngineError):
    """Blocks are owned twice, lost, or counted wrongly."""

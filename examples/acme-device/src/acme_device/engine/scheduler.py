"""The scheduler: parts of prompts end with a block."""

from __future__ import annotations

from acme_device.engine.usage import usage
from opweave_engine.scheduler import Scheduled, Scheduler


class AcmeScheduler(Scheduler):
    """Cuts a part of a prompt where its last whole block ends.

    The device moves keys and values by blocks. A part that ends within a block would have the next
    one load it again, to fill it; so the next part takes these tokens, and begins with a block.
    """

    def schedule(self) -> list[Scheduled]:
        return [self._aligned(item) for item in super().schedule()]

    def _aligned(self, item: Scheduled) -> Scheduled:
        if item.is_complete:
            return item
        start, size = item.request.num_computed_tokens, self.cache.block_size
        count = (start + item.num_tokens) // size * size - start
        if not 0 < count < item.num_tokens:  # within one block, or at its end already
            return item
        usage.aligned_parts += 1
        return item._replace(num_tokens=count)

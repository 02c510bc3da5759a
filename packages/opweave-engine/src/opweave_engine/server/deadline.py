"""Deadline of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opweave_engine.server.errors import ApiError


class Deadline:
    """A deadline *seconds* from now.

    Attributes:
        at: the deadline in the event loop's time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.at = asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancel the block at the deadline.

        Raises:
            ApiError: the deadline passed.
        """
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError as error:
            raise ApiError(
                f"The request was not answered within {self._seconds:g} s.",
                status=504,
                code="timeout",
            ) from error

"""When a request must have been answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opweave.server.errors import ApiError


class Deadline:
    """The end of the time that a request has, which begins now.

    Attributes:
        at: the loop's time then.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.at = asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancel what is done within if it takes longer.

        Raises:
            ApiError: it has.
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

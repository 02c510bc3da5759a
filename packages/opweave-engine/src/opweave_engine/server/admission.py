"""Admission control: limits the number of unfinished outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from opweave_engine.server.errors import HANG_UP, RETRY, ApiError


class Admission:
    """Counts running and queued outputs, up to *limit*."""

    def __init__(self, limit: int) -> None:
        self.active = 0
        self.is_closed = False
        self._limit = limit
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def places(self, count: int, *, param: str) -> Iterator[None]:
        """Reserve *count* outputs, the number that the request's field *param* asks for.

        Raises:
            ApiError: the limit would be exceeded, or the server is shutting down.
        """
        self.check(count, param=param)
        self.active += count
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= count
            if not self.active:
                self._idle.set()

    def close(self) -> None:
        """Reject all further requests."""
        self.is_closed = True

    async def wait_idle(self) -> None:
        """Wait until no output is reserved."""
        await self._idle.wait()

    def check(self, count: int, *, param: str) -> None:
        """Raise the ApiError that :meth:`places` would raise now."""
        if self.is_closed:
            raise ApiError(
                "The server is shutting down and takes no more requests.",
                status=503,
                code="shutting_down",
                headers={**RETRY, **HANG_UP},
            )
        if count > self._limit:
            raise ApiError(
                f"The request asks for {count} answers, more than the {self._limit} that the "
                "server works on at one time. Send several requests.",
                param=param,
                code="too_many_answers",
            )
        if self.active + count > self._limit:
            raise ApiError(
                f"The server works on {self.active} answers, of at most {self._limit}, and the "
                f"request asks for {count} more. Try again later.",
                status=429,
                code="queue_full",
                headers=RETRY,
            )

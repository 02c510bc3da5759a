"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def merge_streams(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield what the streams yield, with the number of the stream.

    For streams whose items hold everything so far: a reader that is slow gets the newest item of
    each and misses older ones. Ends when all have ended; closes all of them, whatever happens.
    """
    newest: dict[int, T] = {}
    news = asyncio.Event()

    async def read(index: int) -> None:
        try:
            async for item in streams[index]:
                newest[index] = item
                news.set()
        finally:
            await close(streams[index])
            news.set()

    tasks = [asyncio.create_task(read(index)) for index in range(len(streams))]
    try:
        while not all(task.done() for task in tasks) or newest:
            await news.wait()
            news.clear()
            while newest:
                index = next(iter(newest))
                yield index, newest.pop(index)
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        await cancelled(tasks)


async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def close(stream: object) -> None:
    """Close *stream* if it is one that has to be closed."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()

"""Merges several streams into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def merge_streams(
    streams: Sequence[AsyncIterator[T]], combine: Callable[[Sequence[T]], T]
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all streams as they arrive, each with the number of its stream.

    Streams are read even if the reader is slow, which then gets several items of a stream combined
    into one. Ends when all streams have ended. Closes all of them at the end, on an error, and when
    it is closed.
    """
    ready: dict[int, list[T]] = {}
    changed = asyncio.Event()

    async def read(index: int) -> None:
        try:
            async for item in streams[index]:
                ready.setdefault(index, []).append(item)
                changed.set()
        finally:
            await close(streams[index])
            changed.set()

    tasks = [asyncio.create_task(read(index)) for index in range(len(streams))]
    try:
        while not all(task.done() for task in tasks) or ready:
            await changed.wait()
            changed.clear()
            while ready:
                index = next(iter(ready))
                yield index, combine(ready.pop(index))
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
    """Close *stream* if it has an ``aclose`` method."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()

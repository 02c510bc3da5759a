"""Several streams as one: everything arrives, and everything is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from opweave_engine.server.disconnect import merge_streams

closed: list[int] = []


def last(items: Sequence[int]) -> int:
    return items[-1]


async def counting(
    number: int, count: int, *, fails: bool = False, delay: float = 0.001
) -> AsyncGenerator[int, None]:
    try:
        for i in range(count):
            await asyncio.sleep(delay)
            yield i
        if fails:
            raise ValueError(number)
    finally:
        closed.append(number)


@pytest.fixture(autouse=True)
def _nothing_closed() -> None:
    closed.clear()


def test_a_slow_reader_gets_items_combined() -> None:
    async def texts(letter: str) -> AsyncGenerator[str, None]:
        for _ in range(50):
            await asyncio.sleep(0.001)
            yield letter

    async def read() -> list[tuple[int, str]]:
        items = []
        async for item in merge_streams([texts("a"), texts("b")], "".join):
            items.append(item)
            await asyncio.sleep(0.02)
        return items

    items = asyncio.run(read())
    assert len(items) < 50
    for number, letter in enumerate("ab"):
        assert "".join(text for n, text in items if n == number) == letter * 50


def test_an_error_ends_all() -> None:
    async def read() -> list[tuple[int, int]]:
        return [
            item
            async for item in merge_streams([counting(0, 2, fails=True), counting(1, 9999)], last)
        ]

    with pytest.raises(ValueError, match="0"):
        asyncio.run(read())
    assert sorted(closed) == [0, 1]

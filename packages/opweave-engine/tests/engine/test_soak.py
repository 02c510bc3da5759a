"""Hours of use in miniature, over HTTP: memory stays, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from models.tiny_checkpoints import Checkpoints, random_ids
from opweave.config import CacheConfig, EngineConfig, SchedulerConfig
from opweave_engine import AsyncEngine
from opweave_engine.request import ActiveRequest, DetokenizedOutput, Request
from server.conftest import Running, running
from server.test_limits import address
from support.processes import wait_until

SECONDS = 300
SAMPLES = 60
USERS = 100
COMPLETIONS = "/v1/completions"
MEMORY = 8 * 1024  # KiB; without a leak, it is below 3 MiB on the busiest machine
KINDS = {"whole": 4, "stream": 4, "hang up": 3, "impatient": 2, "abort": 2, "refused": 2}
OF_A_REQUEST = {ActiveRequest, DetokenizedOutput, Request}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": [5, 6]}),
    (COMPLETIONS, {"prompt": [5] * 200}),
    (COMPLETIONS, {"prompt": [5], "temperature": -1}),
    (COMPLETIONS, {"prompt": [5], "stop_token_ids": [10**6]}),
    ("/v1/chat/completions", {"messages": []}),
]


@dataclass
class Users:
    """Clients that do what clients do, until *end*.

    Attributes:
        server: whom they ask.
        end: when they stop, by the monotonic clock.
        done: how often which kind of request was made.
    """

    server: Running
    end: float
    done: Counter[str] = field(default_factory=Counter)
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    shared: list[int] = field(default_factory=lambda: random_ids(0, 48))

    async def all(self) -> None:
        await asyncio.gather(*(self.one() for _ in range(USERS)))

    async def one(self) -> None:
        while time.monotonic() < self.end:
            (kind,) = self.chance.choices([*KINDS], [*KINDS.values()])
            await getattr(self, kind.replace(" ", "_"))(self.body())
            self.done[kind] += 1

    def body(self) -> dict[str, Any]:
        draw = self.chance
        own = random_ids(draw.randrange(10**6), draw.randrange(1, 30))
        return {
            "prompt": [*self.shared[: draw.choice([0, 16, 40])], *own],
            "temperature": draw.choice([0.0, 1.0]),
            "top_k": draw.choice([0, 20]),
            "repetition_penalty": draw.choice([1.0, 1.2]),
            "logprobs": draw.choice([None, None, 2]),
            "echo": draw.choice([None, None, True]),
            "n": draw.choice([1, 1, 3]),
            "max_tokens": draw.randrange(1, 20),
            "priority": draw.randrange(3),
        }

    async def whole(self, body: dict[str, Any]) -> None:
        *head, answer = [line async for line in self.lines(COMPLETIONS, body)]
        assert head[0].startswith(b"HTTP/1.1 200"), answer
        assert len(json.loads(answer)["choices"]) == body["n"]

    async def stream(self, body: dict[str, Any]) -> None:
        events = [event async for event in self.events(body)]
        assert events[-1] == b"[DONE]"

    async def hang_up(self, body: dict[str, Any]) -> None:
        stays = self.chance.randrange(1, 8)
        async with aclosing(self.events(body)) as events:
            async for _ in events:
                stays -= 1
                if not stays:
                    return

    async def impatient(self, body: dict[str, Any]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.chance.uniform(0.0, 0.5)):
                await self.whole(body)

    async def abort(self, body: dict[str, Any]) -> None:
        last = b""
        async for event in self.events(body):
            if not last:
                await self.server.engine.abort(f"{json.loads(event)['id']}-0")
            last = event
        assert last == b"[DONE]"

    async def refused(self, _: dict[str, Any]) -> None:
        path, wrong = self.chance.choice(REFUSED)
        head = [line async for line in self.lines(path, wrong)]
        assert head[0].startswith(b"HTTP/1.1 400"), head

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.lines(COMPLETIONS, {**body, "stream": True})) as lines:
            async for line in lines:
                if line.startswith(b"data: "):
                    yield line[6:].strip()

    async def lines(self, path: str, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yield what the server sends, line by line; closing it hangs up."""
        reader, writer = await asyncio.open_connection(*address(self.server), limit=2**22)
        try:
            content = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + content)
            while line := await reader.readline():
                yield line
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def resident() -> int:
    """Return the memory of this process that is in use, in KiB."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_is_steady(checkpoint: Checkpoints) -> None:
    config = EngineConfig(
        cache=CacheConfig(block_size=16, num_blocks=40),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=64, policy="priority"),
    )
    path, _ = checkpoint("llama")
    engine: Any = AsyncEngine(path, config=config)
    sizes: list[int] = []

    async def run(users: Users) -> None:
        asking = asyncio.create_task(users.all())
        while not asking.done():
            await asyncio.wait([asking], timeout=SECONDS / SAMPLES)
            sizes.append(resident())
        await asking

    with running(engine, template=None) as server:
        users = Users(server, time.monotonic() + SECONDS)
        asyncio.run(run(users))
        wait_until(lambda: engine.stats().running == engine.stats().waiting == 0)
        wait_until(lambda: server.state.admission.active == 0)
        assert server.get("/health").status_code == 200
    engine.shutdown()
    engine._core.check_idle()  # every block is free, and the books agree
    stats = engine.stats()
    print(users.done, stats, sizes)  # which pytest shows if something is wrong
    assert set(users.done) == set(KINDS)
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.finished["abort"] > 0
    gc.collect()
    kept = Counter(type(o).__name__ for o in gc.get_objects() if type(o) in OF_A_REQUEST)
    assert not kept
    # The first third fills pools of the allocator.
    third = len(sizes) // 3
    assert max(sizes[-third:]) < max(sizes[third:-third]) + MEMORY, sizes

"""Hours of use in miniature: memory stays, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.tiny_checkpoints import random_ids
from opweave.config import CacheConfig, EngineConfig, SchedulerConfig
from opweave.engine import AsyncEngine, SamplingParams

Checkpoints = Callable[[str], tuple[Path, Any]]
SECONDS = 150
AT_ONCE = 200


def resident() -> int:
    """Return the memory of this process that is in use, in KiB."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_is_steady(checkpoint: Checkpoints) -> None:
    chance = random.Random(1)
    config = EngineConfig(
        cache=CacheConfig(block_size=16, num_blocks=40),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=64, policy="priority"),
    )
    engine = AsyncEngine(checkpoint("llama")[0], config=config)
    end = time.monotonic() + SECONDS
    shared, sizes = random_ids(0, 48), list[int]()

    async def user(name: int) -> int:
        done = 0
        while time.monotonic() < end:
            own = random_ids(chance.randrange(10**6), chance.randrange(1, 30))
            prompt = [*shared[: chance.choice([0, 16, 40])], *own]
            params = SamplingParams(
                temperature=chance.choice([0.0, 1.0]),
                top_k=chance.choice([0, 20]),
                max_tokens=chance.randrange(1, 20),
            )
            stays = chance.choice([1, 3, 99, 99])
            stream = engine.generate(
                prompt, params, request_id=f"{name}-{done}", priority=chance.randrange(3)
            )
            async for output in stream:
                stays -= 1
                if stays == 0 and not output.finished:
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            done += 1
        return done

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(SECONDS / 30)
            sizes.append(resident())

    async def run() -> int:
        _, *done = await asyncio.gather(watch(), *map(user, range(AT_ONCE)))
        return sum(done)

    done = asyncio.run(run())
    engine.shutdown()
    engine._core.check_idle()
    stats = engine.stats()
    assert done > 1000
    assert sum(stats.finished.values()) == done
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    # The first third fills pools of the allocator.
    early, late = max(sizes[:10]), max(sizes[20:])
    assert late < early + 16 * 1024, sizes

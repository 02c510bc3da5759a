"""How many threads kernels use: as the configuration says, until the engine shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from models.tiny_checkpoints import Checkpoints
from opweave import platforms
from opweave.config import EngineConfig
from opweave.ir.errors import SettingError
from opweave_engine import LLM, AsyncEngine, Embedder, SamplingParams
from opweave_engine.parallel.executor import _threads
from opweave_engine.runner import cpu_threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with cpu_threads(1):
        yield


def test_an_engine(checkpoint: Checkpoints) -> None:
    llm = LLM(checkpoint("llama")[0], config=EngineConfig(cpu_threads=2))
    assert torch.get_num_threads() == 2
    llm.shutdown()
    assert torch.get_num_threads() == 1


def test_the_thread_of_an_engine(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncEngine(checkpoint("llama")[0], config=EngineConfig(cpu_threads=2))
    found: list[int] = []
    executor: Any = engine._core.executor
    execute = executor.worker.execute

    def spy(steps: Any) -> Any:
        found.append(torch.get_num_threads())
        return execute(steps)

    monkeypatch.setattr(executor.worker, "execute", spy)

    async def ask() -> None:
        async for _ in engine.generate([5, 6], SamplingParams(max_tokens=2), request_id="a"):
            pass

    asyncio.run(ask())
    engine.shutdown()
    assert found
    assert set(found) == {2}


def test_an_engine_that_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Unknown"]}')
    with pytest.raises(Exception, match="Unknown"):
        LLM(tmp_path, config=EngineConfig(cpu_threads=2, load_format="dummy"))
    assert torch.get_num_threads() == 1


def test_an_encoder(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = Embedder(checkpoint("bert")[0], config=EngineConfig(cpu_threads=2))
    found: list[int] = []
    forward = embedder._forward

    def spy(*arguments: Any) -> Any:
        found.append(torch.get_num_threads())
        return forward(*arguments)

    monkeypatch.setattr(embedder, "_forward", spy)
    embedder.embed([5, 6, 7])
    assert found == [2]
    assert torch.get_num_threads() == 1


def test_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = platforms.current_platform
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    with cpu_threads(4):
        assert _threads(EngineConfig(cpu_threads=3), platform, 2) == 3
        assert _threads(EngineConfig(), platform, 2) == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        assert _threads(EngineConfig(cpu_threads=3), platform, 2) == 3
        assert _threads(EngineConfig(), platform, 2) is None


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_numbers_that_are_none(count: Any) -> None:
    with pytest.raises(SettingError, match="cpu_threads"):
        EngineConfig(cpu_threads=count)

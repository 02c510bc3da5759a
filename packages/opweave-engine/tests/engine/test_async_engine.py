"""Many requests at once from asyncio: the answers are those of LLM, and nothing is left behind."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from models.tiny_checkpoints import Checkpoints, random_ids
from opweave.config import CacheConfig, EngineConfig, SchedulerConfig
from opweave_engine import (
    LLM,
    AsyncEngine,
    EngineClient,
    EngineDeadError,
    InvalidArgumentError,
    NonFiniteLogitsError,
    PromptError,
    RequestOutput,
    SamplingParams,
    SamplingParamsError,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
PROMPTS = [random_ids(seed, 5 + 7 * seed % 13) for seed in range(12)]
# Little memory: requests lose their blocks and are computed again.
SMALL = EngineConfig(
    cache=CacheConfig(block_size=16, num_blocks=7),
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24),
)


@pytest.fixture
def engine(checkpoint: Checkpoints) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(checkpoint("llama")[0], config=SMALL)
    yield engine
    engine.shutdown()


async def answer(engine: EngineClient, name: str, prompt: Any, params: Any = GREEDY) -> Any:
    last: RequestOutput | None = None
    async for output in engine.generate(prompt, params, request_id=name):
        if last is not None:
            assert not last.finished
            known = last.outputs[0].token_ids
            assert output.outputs[0].token_ids[: len(known)] == known
            assert output.outputs[0].text.startswith(last.outputs[0].text)
        last = output
    assert last.finished
    assert last.request_id == name
    return last


async def settled(engine: AsyncEngine) -> None:
    """Wait until the engine has heard of everything, then check that all blocks are free."""
    for _ in range(500):
        if not engine._core.has_unfinished and engine._commands.empty():
            break
        await asyncio.sleep(0.01)
    engine._core.check_idle()


def test_answers_are_those_of_llm(engine: AsyncEngine, checkpoint: Checkpoints) -> None:
    path = checkpoint("llama")[0]
    wanted = [output.outputs[0] for output in LLM(path).generate(PROMPTS, GREEDY)]

    async def run() -> list[RequestOutput]:
        jobs = (answer(engine, str(i), prompt) for i, prompt in enumerate(PROMPTS))
        found = await asyncio.gather(*jobs)
        await settled(engine)
        return found

    found = asyncio.run(run())
    assert [output.outputs[0] for output in found] == wanted
    assert [output.prompt_token_ids for output in found] == PROMPTS
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.preemptions > 0
    assert stats.generation_tokens == 12 * len(PROMPTS)
    assert stats.prompt_tokens == sum(map(len, PROMPTS))
    assert stats.finished == {"length": len(PROMPTS)}
    assert stats.replicas == 1
    counts = {name: sum(found.counts) for name, found in stats.histograms.items()}
    assert counts["time_to_first_token"] == counts["e2e_latency"] == len(PROMPTS)
    assert counts["inter_token_latency"] == 11 * len(PROMPTS)
    assert counts["iteration_tokens"] == counts["step_time"] == stats.steps
    for output in found:
        assert 0 < output.timings.scheduled <= output.timings.first_token
        assert output.timings.first_token <= output.timings.finished


@pytest.mark.parametrize("streams", [True, False])
def test_the_loop_wakes_once_per_step(engine: AsyncEngine, streams: bool) -> None:
    async def read(name: str) -> int:
        prompt = PROMPTS[int(name)]
        outputs = engine.generate_deltas(prompt, GREEDY, request_id=name, streams=streams)
        return len([delta async for delta in outputs])

    async def run() -> list[int]:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def count(*arguments: Any, **options: Any) -> Any:
            wakes.append(arguments)
            return wake(*arguments, **options)

        loop.call_soon_threadsafe = count  # type: ignore[method-assign]
        return await asyncio.gather(*map(read, "0123"))

    wakes: list[Any] = []
    deltas = asyncio.run(run())
    stats = engine.stats()
    assert stats.generation_tokens == 48
    assert len(wakes) <= (stats.steps if streams else 4)
    assert stats.steps < 40
    if not streams:
        assert deltas == [1] * 4


def test_one_delta_is_the_whole_output(engine: AsyncEngine, checkpoint: Checkpoints) -> None:
    params = replace(GREEDY, n=2)
    (wanted,) = LLM(checkpoint("llama")[0]).generate([PROMPTS[3]], params)

    async def run() -> list[RequestOutput]:
        outputs = engine.generate_deltas(PROMPTS[3], params, request_id="a", streams=False)
        return [output async for output in outputs]

    (found,) = asyncio.run(run())
    assert found.outputs == wanted.outputs
    assert found.prompt_token_ids == PROMPTS[3]


def test_tokens_before_an_error_are_read(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, execute = itertools.count(), engine._core.executor.execute

    def fail(steps: Any) -> Any:
        if next(calls) == 4:
            raise NonFiniteLogitsError("no numbers", [0])
        return execute(steps)

    async def read(found: list[RequestOutput]) -> None:
        outputs = engine.generate_deltas(PROMPTS[1], LONG, request_id="a", streams=False)
        async for delta in outputs:
            found.append(delta)

    monkeypatch.setattr(engine._core.executor, "execute", fail)
    found: list[RequestOutput] = []
    with pytest.raises(NonFiniteLogitsError, match="no numbers"):
        asyncio.run(read(found))
    assert [len(delta.outputs[0].token_ids) for delta in found] == [4]
    assert not found[0].finished


def test_an_abort_ends_the_answer(engine: AsyncEngine) -> None:
    async def run() -> RequestOutput:
        stream = engine.generate(PROMPTS[1], LONG, request_id="a")
        first = await anext(stream)
        assert not first.finished
        await engine.abort("a")
        await engine.abort("no such request")
        async for output in stream:
            last = output
        await settled(engine)
        return last

    last = asyncio.run(run())
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert len(last.outputs[0].token_ids) < 80
    assert engine.stats().finished == {"abort": 1}


def test_wrong_requests(engine: AsyncEngine) -> None:
    async def run() -> None:
        with pytest.raises(PromptError, match="context is 96"):
            await answer(engine, "a", [5] * 200)
        with pytest.raises(PromptError, match="surrogate"):
            await answer(engine, "a", "\ud800")
        with pytest.raises(SamplingParamsError, match="None, not SamplingParams"):
            await answer(engine, "a", "a", None)
        wrong: Any
        for wrong in (None, "1", 1.0, True, float("nan")):
            with pytest.raises(InvalidArgumentError, match=r"^priority=.* must be an integer"):
                await anext(engine.generate("a", LONG, request_id="a", priority=wrong))
        stream = engine.generate(PROMPTS[1], LONG, request_id="b")
        await anext(stream)
        with pytest.raises(InvalidArgumentError, match="'b' is in use"):
            await answer(engine, "b", PROMPTS[2])
        await stream.aclose()  # type: ignore[attr-defined]
        await settled(engine)
        assert len((await answer(engine, "b", PROMPTS[2])).outputs[0].token_ids) == 12
        with pytest.raises(InvalidArgumentError, match="does not make embeddings"):
            await engine.embed("a", request_id="c")

    asyncio.run(run())
    assert engine.is_running


def test_names_of_requests_are_free(engine: AsyncEngine) -> None:
    two = replace(GREEDY, n=2)

    async def run() -> list[RequestOutput]:
        names = ["a", "a#1", "a#0", "0", "#"]
        return await asyncio.gather(*(answer(engine, n, PROMPTS[1], two) for n in names))

    texts = {a.text for output in asyncio.run(run()) for a in output.outputs}
    assert len(texts) == 1
    assert engine.is_running


def test_a_request_that_the_scheduler_refuses_fails_alone(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = engine._core.scheduler.add

    def refuse(request: Any) -> None:
        if request.num_prompt_tokens == 3:
            raise RuntimeError("no room for three")
        add(request)

    monkeypatch.setattr(engine._core.scheduler, "add", refuse)

    async def run() -> None:
        other = asyncio.create_task(answer(engine, "other", PROMPTS[1]))
        for _ in range(2):  # its name is free again
            with pytest.raises(RuntimeError, match="no room for three"):
                await answer(engine, "a", [5, 6, 7])
        await other
        await settled(engine)
        await engine.drain(5)

    asyncio.run(run())
    assert engine.dead_with is None


def test_drain_finishes_what_was_accepted(engine: AsyncEngine) -> None:
    async def run() -> list[RequestOutput]:
        jobs = [asyncio.create_task(answer(engine, str(i), PROMPTS[i])) for i in range(4)]
        await asyncio.sleep(0)
        await engine.drain(timeout=60)
        assert not engine.is_running
        with pytest.raises(EngineDeadError, match="shut down"):
            await answer(engine, "late", PROMPTS[0])
        return await asyncio.gather(*jobs)

    found = asyncio.run(run())
    assert {output.outputs[0].finish_reason for output in found} == {"length"}
    assert engine.dead_with is None


def test_drain_aborts_what_takes_too_long(engine: AsyncEngine) -> None:
    async def run() -> RequestOutput:
        job = asyncio.create_task(answer(engine, "a", PROMPTS[1], LONG))
        await asyncio.sleep(0)
        await engine.drain(timeout=0)
        found: RequestOutput = await job
        await settled(engine)
        return found

    assert asyncio.run(run()).outputs[0].finish_reason == "abort"


def test_drain_comes_to_an_end_where_the_engine_hangs(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("opweave_engine.client._ABORT_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(engine._core.executor, "execute", lambda steps: go_on.wait())

    async def run() -> None:
        job = asyncio.create_task(answer(engine, "a", PROMPTS[1], LONG))
        while not engine.stats().running:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(engine.drain(timeout=0), 30)
        with pytest.raises(EngineDeadError, match="shut down"):
            await job

    asyncio.run(asyncio.wait_for(run(), 60))
    go_on.set()


def test_a_loop_that_ends_gives_up_what_it_asked(engine: AsyncEngine) -> None:
    async def first() -> None:
        await anext(engine.generate(PROMPTS[1], LONG, request_id="a"))

    async def second() -> None:
        await answer(engine, "a", PROMPTS[2])
        await asyncio.wait_for(engine.drain(timeout=30), 60)
        await settled(engine)

    asyncio.run(first())
    asyncio.run(settled(engine))
    asyncio.run(second())


def test_a_loop_that_is_closed_around_a_reader(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, go_on = engine._core.step, threading.Event()
    go_on.set()
    monkeypatch.setattr(engine._core, "step", lambda: (go_on.wait(), step())[1])
    stream = engine.generate(PROMPTS[1], LONG, request_id="a")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(stream))
    go_on.clear()
    loop.close()

    async def second() -> None:
        with pytest.raises(InvalidArgumentError, match="in use"):  # until the engine has heard
            await answer(engine, "a", PROMPTS[2])
        go_on.set()
        while engine._unfinished:
            await asyncio.sleep(0.01)
        again = asyncio.create_task(answer(engine, "a", PROMPTS[2], LONG))
        await asyncio.sleep(0)
        await stream.aclose()  # type: ignore[attr-defined]
        assert (await again).outputs[0].finish_reason == "length"
        await engine.drain(timeout=30)
        await settled(engine)

    asyncio.run(asyncio.wait_for(second(), 60))
    assert engine.stats().finished == {"abort": 1, "length": 1}


def test_a_second_loop_at_the_same_time_is_refused(engine: AsyncEngine) -> None:
    def elsewhere() -> None:
        with pytest.raises(InvalidArgumentError, match="runs in another thread"):
            asyncio.run(asyncio.wait_for(answer(engine, "b", PROMPTS[2]), 60))

    async def run() -> RequestOutput:
        stream = engine.generate(PROMPTS[1], LONG, request_id="a")
        await anext(stream)
        await asyncio.to_thread(elsewhere)
        async for output in stream:
            last = output
        return last

    assert asyncio.run(run()).outputs[0].finish_reason == "length"
    assert asyncio.run(answer(engine, "b", PROMPTS[2])).finished


def test_shutdown_aborts(engine: AsyncEngine) -> None:
    async def run() -> RequestOutput:
        stream = engine.generate(PROMPTS[1], LONG, request_id="a")
        await anext(stream)
        engine.shutdown()
        async for output in stream:
            last = output
        return last

    assert asyncio.run(run()).outputs[0].finish_reason == "abort"
    engine.shutdown()  # once more does nothing


def test_a_dead_engine_tells_everybody(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, execute = itertools.count(), engine._core.executor.execute

    def fail(steps: Any) -> Any:
        if next(calls) > 2:
            raise RuntimeError("the device is gone")
        return execute(steps)

    async def reads(stream: AsyncIterator[RequestOutput]) -> None:
        async for _ in stream:
            pass

    async def run() -> None:
        monkeypatch.setattr(engine._core.executor, "execute", fail)
        jobs = [
            asyncio.create_task(reads(engine.generate(PROMPTS[i], LONG, request_id=str(i))))
            for i in range(3)
        ]
        for error in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
            assert "the device is gone" in str(error)
            assert isinstance(error.__cause__, RuntimeError)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await answer(engine, "late", PROMPTS[0])

    asyncio.run(run())
    assert not engine.is_running
    assert isinstance(engine.dead_with, RuntimeError)
    engine._thread.join()
    stats = engine.stats()
    assert (stats.replicas, stats.running, stats.waiting) == (0, 0, 0)
    assert stats.finished == {"error": 3}

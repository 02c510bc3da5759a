"""Replicas share the requests; here they are in this process, and their engines answer at will."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.replicas_here import ReplicasHere
from opweave import ir
from opweave.config import CacheConfig, EngineConfig, KernelConfig, ParallelConfig
from opweave.ir.errors import SettingError, UnknownProviderError
from opweave.layers import ShardingError
from opweave.platforms.base import UnsupportedByPlatformError
from opweave_engine import (
    LLM,
    AsyncEngine,
    DataParallelEngine,
    Embedder,
    EngineClient,
    EngineDeadError,
    EngineError,
    InvalidArgumentError,
    MissingDependencyError,
    NonFiniteLogitsError,
    PromptError,
    ReplicaFailedError,
    RequestOutput,
    SamplingParams,
    open_engine,
)
from opweave_engine.metrics import NOTHING, SECONDS, Histogram, KernelUse, after_death, merged
from opweave_engine.parallel.data_parallel import ReplicaHandle, ReplicaRouter, Replicas
from opweave_engine.parallel.rank import Agreement
from opweave_engine.parallel.ray import (
    Method,
    RayGroup,
    portable,
    replica_config,
    replica_resources,
    resource_name,
)
from server.conftest import running
from server.fake_engine import CHECKPOINT, FakeEngine
from support.fixtures import FreshPython

SEEDED = SamplingParams(seed=1, max_tokens=6)
ENDLESS = replace(SEEDED, max_tokens=200)


def parallel(size: int = 2, **changes: Any) -> EngineConfig:
    return EngineConfig(parallel=ParallelConfig(data_parallel_size=size, **changes))


@contextmanager
def replicated(
    make: Callable[[int], Any] = lambda _: FakeEngine(),
    config: EngineConfig | None = None,
    **arguments: Any,
) -> Iterator[tuple[DataParallelEngine, ReplicasHere]]:
    config = config or parallel()
    group = ReplicasHere(config.parallel.data_parallel_size, make)
    try:
        engine = DataParallelEngine(CHECKPOINT, config=config, group=group, **arguments)
        try:
            yield engine, group
        finally:
            engine.shutdown()
    finally:
        group.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not happened():
            await asyncio.sleep(0.005)


async def answer(engine: EngineClient, name: str, **options: Any) -> RequestOutput:
    params = options.pop("params", SEEDED)
    outputs = engine.generate(options.pop("prompt", name), params, request_id=name, **options)
    return [output async for output in outputs][-1]


# The router


def test_requests_go_where_the_fewest_are() -> None:
    router = ReplicaRouter(3)
    assert [router.choose([1], 1, range(3)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    router.release(1, 2)
    assert [router.choose([1], 1, range(3)) for _ in range(2)] == [1, 1]
    assert router.choose([1], 5, [0, 2]) in (0, 2)
    assert sum(router.loads) == 11
    assert router.choose([1], 1, [1]) == 1


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=60), st.integers(1, 4))
def test_loads_without_prefixes_never_differ_by_more_than_a_request(
    requests: list[tuple[int, bool]], size: int
) -> None:
    router, owed = ReplicaRouter(size, finds_prefixes=False), []
    for answers, ends in requests:
        least = min(router.loads)
        chosen = router.choose(list(range(200)), answers, range(size))
        assert router.loads[chosen] - answers == least
        owed.append((chosen, answers))
        if ends:
            router.release(*owed.pop(0))
    for each in owed:
        router.release(*each)
    assert router.loads == [0] * size


def test_a_prefix_draws_requests_until_the_others_have_much_less_to_do() -> None:
    prompt, other = list(range(300)), list(range(1000, 1300))
    router = ReplicaRouter(2)
    assert router.choose(prompt, 1, range(2)) == 0
    assert router.choose(other, 1, range(2)) == 1
    # Of 300 tokens, four blocks of 64 are whole; a turn of a conversation adds to them.
    assert [router.choose([*prompt, *range(i)], 1, range(2)) for i in range(4)] == [0] * 4
    assert router.choose(prompt[:70], 1, range(2)) == 0
    assert router.loads == [6, 1]
    assert router.choose(prompt, 1, range(2)) == 1  # which knows it from now on
    router.release(0, 6)
    assert router.choose(other, 1, range(2)) == 1
    router.forget(1)
    assert router.choose(other, 1, range(2)) == 0
    without = ReplicaRouter(2, finds_prefixes=False)
    assert [without.choose(prompt, 1, range(2)) for _ in range(4)] == [0, 1, 0, 1]
    assert ReplicaRouter(2).choose([2**70] * 100, 1, range(2)) == 0  # no token; the replica says so


def test_a_prefix_with_another_salt_draws_no_requests() -> None:
    router, ids = ReplicaRouter(3), list(range(128))
    chosen = [router.choose(ids, 1, range(3), salt) for salt in ("ann", "bob", None)]
    assert sorted(chosen) == [0, 1, 2]
    for replica in range(3):
        router.release(replica, 1)
    assert [router.choose(ids, 1, range(3), salt) for salt in (None, "bob", "ann")] == chosen[::-1]


# Messages of replicas


class OddError(Exception):
    """An exception that cannot be rebuilt from its message."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


def test_errors_travel() -> None:
    rows = NonFiniteLogitsError("no numbers", [3])
    found = portable(rows)
    assert isinstance(found, NonFiniteLogitsError)
    assert (str(found), found.rows) == ("no numbers", (3,))
    assert repr(portable(OddError("a", "b"))) == repr(EngineError("OddError: a and b"))
    assert isinstance(portable(SystemExit(3)), EngineError)


# The engine


def test_answers_are_those_of_one_engine() -> None:
    async def work(engine: DataParallelEngine, group: ReplicasHere) -> None:
        names = [f"number {i}" for i in range(9)]
        found = await asyncio.gather(*(answer(engine, name) for name in names))
        alone_ = [await answer(FakeEngine(), name) for name in names]
        assert [each.outputs for each in found] == [each.outputs for each in alone_]
        assert [each.prompt_token_ids for each in found] == [a.prompt_token_ids for a in alone_]
        counts = Counter(len(each.calls) for each in group.engines.values())
        assert counts == {4: 1, 5: 1}
        several = await answer(engine, "n", params=replace(SEEDED, n=3, logprobs=1), priority=-2)
        (call,) = (c for e in group.engines.values() for c in e.calls if c.request_id == "n")
        assert call.priority == -2
        assert [len(each.logprobs or ()) for each in several.outputs] == [6] * 3
        assert engine._router.loads == [0, 0]
        left = [engine._assignments, engine._streams, engine._unfinished]
        assert not any(left)

    loaded: list[tuple[int, int]] = []
    with replicated(progress=lambda *each: loaded.append(each)) as (engine, group):
        assert (engine.model_name, engine.max_model_len) == ("tiny-pydoc", 256)
        assert engine.is_running
        assert engine.dead_with is None
        assert [order.replicas_on_node for _, order in group.orders] == [2, 2]
        assert group.orders[0][1].model == CHECKPOINT
        assert loaded == [(1, 2)]  # of the first one
        run(work(engine, group))
    assert group.is_closed
    assert not engine.is_running
    with pytest.raises(EngineDeadError, match="shut down"):
        asyncio.run(answer(engine, "late"))


def test_outputs_come_one_by_one_and_a_reader_that_leaves_aborts() -> None:
    async def work(engine: DataParallelEngine, group: ReplicasHere) -> None:
        texts = []
        stream: Any = engine.generate("x", ENDLESS, request_id="a")
        async with aclosing(stream):
            async for output in stream:
                texts.append(output.outputs[0].text)
                if len(texts) == 5:
                    break
        assert all(new.startswith(old) for old, new in pairwise(texts))
        with pytest.raises(InvalidArgumentError, match="request_id='a' is in use"):
            await answer(engine, "a")
        await until(lambda: "a" not in engine._unfinished)
        assert sum("a" in each._given_up for each in group.engines.values()) == 1
        assert engine._router.loads == [0, 0]
        told = asyncio.create_task(answer(engine, "b", params=ENDLESS))
        await until(lambda: any("b" in e.running for e in group.engines.values()))
        await engine.abort("b")
        assert (await told).outputs[0].finish_reason == "abort"
        await engine.abort("unknown")
        await until(lambda: engine.stats().running == 0)

    with replicated(lambda _: FakeEngine(delay=0.01)) as (engine, group):
        run(work(engine, group))


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_abort_that_comes_at_once_or_before_its_request(is_lost: bool) -> None:
    async def work(engine: DataParallelEngine, group: ReplicasHere) -> None:
        send = group.send

        def lossy(replica: int, method: Method, *arguments: object) -> None:
            if method == "abort":
                group.send = send  # type: ignore[method-assign]
            else:
                send(replica, method, *arguments)

        if is_lost:
            group.send = lossy  # type: ignore[method-assign]
        reading = asyncio.create_task(answer(engine, "a", params=ENDLESS))
        while "a" not in engine._assignments:
            await asyncio.sleep(0)
        reading.cancel()
        await until(lambda: not engine._assignments)
        assert sum("a" in each._given_up for each in group.engines.values()) == 1

    with replicated(lambda _: FakeEngine(delay=0.05)) as (engine, group):
        run(work(engine, group))


def test_seeds_are_drawn_as_by_one_engine() -> None:
    async def work(engine: DataParallelEngine, group: ReplicasHere) -> None:
        for i in range(4):
            await answer(engine, str(i), params=SamplingParams(max_tokens=1))
        await answer(engine, "own", params=SamplingParams(max_tokens=1, seed=7))
        calls = [call for each in group.engines.values() for call in each.calls]
        seeds = {call.request_id: call.params.seed for call in calls}
        prepare: Any = LLM(CHECKPOINT, dtype="float32", seed=3)._core.prepare
        wanted = [prepare.__self__.seeds.of(SamplingParams()) for _ in range(4)]
        assert [seeds[str(i)] for i in range(4)] == wanted
        assert seeds["own"] == 7

    config = replace(parallel(), seed=3)
    with replicated(config=config) as (engine, group):
        run(work(engine, group))


def test_errors_of_a_request_are_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async def work(engine: DataParallelEngine, group: ReplicasHere) -> None:
        with pytest.raises(PromptError):
            await answer(engine, "bad", prompt=[5, 99999])
        with pytest.raises(InvalidArgumentError, match="does not make embeddings"):
            await engine.embed("x", request_id="v")
        for each in group.engines.values():
            each.fails_after, each.raises = 2, ZeroDivisionError("a defect")
        with pytest.raises(ZeroDivisionError):
            await answer(engine, "broken")
        assert engine.is_running
        assert engine._router.loads == [0, 0]

    with replicated() as (engine, group):
        run(work(engine, group))
    assert "request broken failed" in caplog.text


def test_vectors() -> None:
    async def work(engine: DataParallelEngine, group: ReplicasHere) -> None:
        ids = [[5] * count for count in range(1, 6)]
        found = await asyncio.gather(*(engine.embed(i, request_id=str(len(i))) for i in ids))
        assert [each.embedding for each in found] == [[len(i), 0.5, -0.25] for i in ids]
        for each in group.engines.values():
            each.delay = 60.0
        lost = [asyncio.create_task(engine.embed([5], request_id=f"l{i}")) for i in range(2)]
        await until(lambda: engine._router.loads == [1, 1])
        group.die(0)
        group.die(1)
        for task in lost:
            with pytest.raises(EngineDeadError, match="it was told to"):
                await task

    with replicated(lambda _: FakeEngine(embeds=True)) as (engine, group):
        run(work(engine, group))


def test_a_vector_that_is_given_up_frees_its_place() -> None:
    """The encoder of the real engine lets its waiters be cancelled."""

    class Encoder(FakeEngine):
        async def embed(self, prompt: Any, params: Any = None, *, request_id: str) -> Any:
            self.task = asyncio.current_task()
            await asyncio.sleep(60)

        async def abort(self, request_id: str) -> None:
            self.task.cancel()

    async def work(engine: DataParallelEngine, group: ReplicasHere) -> None:
        waiting = asyncio.create_task(engine.embed([5], request_id="v"))
        await until(lambda: any(hasattr(each, "task") for each in group.engines.values()))
        await engine.abort("v")
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await engine.drain(60)

    with replicated(lambda _: Encoder(embeds=True)) as (engine, group):
        run(work(engine, group))


def test_a_dead_replica_fails_its_own_requests_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(engine: DataParallelEngine, group: ReplicasHere) -> None:
        await asyncio.gather(*(answer(engine, f"first {i}") for i in range(4)))
        tasks = [asyncio.create_task(answer(engine, f"{i}", params=ENDLESS)) for i in range(4)]
        await until(lambda: engine._router.loads == [2, 2])
        lost = [name for name, a in engine._assignments.items() if a.member.number == 1]
        group.die(1)
        with pytest.raises(EngineDeadError, match="replica 1 died: it was told to"):
            await tasks[int(lost[0])]
        assert engine.is_running  # the other one
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(each, EngineDeadError) for each in found) == 2
        assert sum(isinstance(each, RequestOutput) for each in found) == 2
        # No other replica gets them: they may have killed this one.
        sent = {call.request_id for each in group.engines.values() for call in each.calls}
        assert not sent & set(lost)
        await until(lambda: engine.stats().replicas == 2)
        # Its finished requests still count, and none of its requests runs.
        assert engine.stats().generation_tokens >= 24
        await until(lambda: engine.stats().running == 0)
        await asyncio.gather(*(answer(engine, f"then {i}") for i in range(4)))
        assert [len(each.calls) > 1 for each in group.engines.values()] == [True, True]

        first = group.engines[0]  # an engine that dies in its replica is replaced, too
        group.in_loop(lambda: first.die(RuntimeError("no memory")))
        await until(lambda: group.engines[0] is not first and engine.stats().replicas == 2)
        assert (await answer(engine, "x")).finished
        assert "no memory" in str(engine._replicas.last_failure)

        monkeypatch.setattr(group, "renew", gone)
        group.die(1)
        await until(lambda: engine.stats().replicas == 1)
        await asyncio.gather(*(answer(engine, f"last {i}") for i in range(4)))

    def gone(replica: int) -> None:
        raise ReplicaFailedError("Ray is gone.")

    with replicated(lambda _: FakeEngine(delay=0.005)) as (engine, group):
        run(work(engine, group))
    assert "replica 1 died: it was told to. Another one takes its place." in caplog.text
    assert "replica 1 died: it was told to. None takes its place: Ray is gone." in caplog.text


def test_what_comes_to_a_replica_that_has_not_loaded_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its predecessor was chosen, and has died meanwhile."""
    go_on = threading.Event()

    def slow(number: int) -> FakeEngine:
        if number in lives:
            go_on.wait(60)
        lives.add(number)
        return FakeEngine()

    async def work(engine: DataParallelEngine, group: ReplicasHere) -> None:
        group.die(1)
        await until(lambda: engine._replicas.members[1].place and not group_is_able(engine))
        monkeypatch.setattr(Replicas, "able", property(lambda self: [1]))
        for wanted in (answer(engine, "a"), engine.embed("x", request_id="v")):
            with pytest.raises(EngineDeadError, match=r"died before it received .*Retry it"):
                await wanted
        monkeypatch.undo()
        go_on.set()
        await until(lambda: group_is_able(engine))
        await answer(engine, "a")
        await engine.drain(60)

    def group_is_able(engine: DataParallelEngine) -> bool:
        return 1 in engine._replicas.able

    lives: set[int] = set()
    with replicated(slow) as (engine, group):
        run(work(engine, group))


def test_a_loop_that_ends_gives_up_what_it_asked() -> None:
    async def first(engine: DataParallelEngine) -> None:
        await anext(engine.generate("a", ENDLESS, request_id="a"))

    async def second(engine: DataParallelEngine) -> None:
        await answer(engine, "b")
        await engine.drain(60)
        assert engine._router.loads == [0, 0]

    with replicated(lambda _: FakeEngine(delay=0.005)) as (engine, _):
        run(first(engine))
        run(until(lambda: sum(engine.stats().finished.values())))  # which nobody hears of
        run(second(engine))


def test_when_all_are_dead_the_server_says_so() -> None:
    made: list[int] = []

    def once(number: int) -> FakeEngine:
        made.append(number)
        if made.count(number) > 1:
            raise RuntimeError("nothing loads any more")
        return FakeEngine(delay=0.01)

    with replicated(once) as (engine, group), running(engine) as server:
        assert server.get("/health").status_code == 200
        assert "opweave_num_replicas" in server.get("/metrics").text
        group.die(0)
        group.die(1)
        asyncio.run(until(lambda: len(made) == 4 and not engine.is_running))
        health = server.get("/health")
        assert (health.status_code, health.json()["error"]) == (503, "ReplicaFailedError")
        refused = server.post("/v1/completions", {"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        asyncio.run(until(lambda: "nothing loads" in str(engine.dead_with)))
        assert len(made) == 4  # what does not load is not tried again
        assert engine.stats().replicas == 0


def test_a_replica_that_is_silent_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    with replicated() as (engine, _):
        first = engine._replicas.members[0]
        assert first.silence is None
        first.timeout = 0.0
        asyncio.run(until(lambda: first.failure is not None))
        assert "replica 0 has not reported for 0 s" in str(first.failure)
        assert engine._replicas.members[1].is_loaded
    placeless = ReplicaHandle(0, 60.0)
    assert placeless.silence is None
    monkeypatch.setattr("opweave_engine.parallel.data_parallel._START_SECONDS", 0.0)
    assert str(placeless.silence).startswith("did not start within 0 s: Ray has no room")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (PromptError("a wrong file"), "replica 1 failed: a wrong file"),
        (RuntimeError("out of memory"), r"replica 1 failed: RuntimeError\('out of memory'\)"),
    ],
)
def test_a_replica_that_does_not_load_is_an_error(error: Exception, shown: str) -> None:
    def make(number: int) -> FakeEngine:
        if number == 1:
            raise error
        return FakeEngine()

    group = ReplicasHere(2, make)
    with pytest.raises(ReplicaFailedError, match=shown):
        DataParallelEngine(CHECKPOINT, config=parallel(), group=group)
    assert group.is_closed


def test_logs_of_replicas_name_them(caplog: pytest.LogCaptureFixture) -> None:
    record = logging.LogRecord("opweave.x", logging.WARNING, "f", 1, "odd", (), None)
    with replicated() as (_, group):
        replica = group._replicas[1]
        replica._records.put(record)
        asyncio.run(until(lambda: "replica 1: odd" in caplog.text))


def test_numbers_are_added_up() -> None:
    times = Histogram(SECONDS)
    times.add(0.3)
    one = replace(
        NOTHING, running=1, waiting=2, kv_usage=0.5, generation_tokens=7, replicas=1,
        finished={"stop": 1}, histograms={"e2e_latency": times.counts()}, compile_seconds=2.0,
        kernels=(KernelUse("a", "x", 1, 2),),
    )  # fmt: skip
    other = replace(one, kv_usage=0.1, finished={"stop": 2, "abort": 1})
    both = merged([one, other])
    assert (both.running, both.waiting, both.generation_tokens, both.replicas) == (2, 4, 14, 2)
    assert both.kv_usage == pytest.approx(0.3)
    assert both.finished == {"stop": 3, "abort": 1}
    assert both.histograms["e2e_latency"].total == pytest.approx(0.6)
    assert sum(both.histograms["e2e_latency"].counts) == 2
    assert (both.compile_seconds, both.kernels) == (2.0, one.kernels)
    later = merged([after_death(one), other])
    assert (later.running, later.generation_tokens, later.kv_usage) == (1, 14, 0.1)
    assert merged([after_death(one)]).kv_usage == 0


# Where replicas are


@pytest.mark.parametrize(
    ("nodes", "replicas", "devices", "processors"),
    [
        ([8], 2, {}, 4),
        ([8], 3, {}, 2),
        ([2, 2], 2, {}, 2),
        ([16, 4], 3, {}, 5),
        ([16, 4], 2, {"GPU": 2}, 8),
        ([4], 4, {"CPU": 1}, 1),
        ([4], 2, {"CPU": 2}, 2),
    ],
)
def test_machines_are_divided(
    nodes: list[int], replicas: int, devices: dict[str, int], processors: int
) -> None:
    found = replica_resources([{"CPU": n, "GPU": 4.0} for n in nodes], replicas, devices)
    assert found == {**devices, "CPU": processors}
    with pytest.raises(InvalidArgumentError, match=r"=2: each replica needs 2 GPU, 1 CPU on one.*"
                       r"have: 1 GPU, 8 CPU; 2 GPU, 8 CPU\. Lower"):  # fmt: skip
        replica_resources([{"CPU": 8, "GPU": 1}, {"CPU": 8, "GPU": 2}], 2, {"GPU": 2})
    with pytest.raises(InvalidArgumentError, match="have: nothing"):
        replica_resources([], 2, {})
    names = [resource_name(kind) for kind in ("cpu", "cuda", "xpu", "npu")]
    assert names == ["CPU", "GPU", "GPU", "NPU"]


def test_replicas_on_one_machine_share_its_memory() -> None:
    config = parallel(data_parallel_address="auto", tensor_parallel_size=2)
    one, several = (replica_config(config, count).cache.memory_bytes for count in (1, 4))
    assert one is not None
    assert several is not None
    assert one // 5 < several < one // 3  # what is free changes in between
    assert replica_config(config, 4).parallel == ParallelConfig(tensor_parallel_size=2)
    told = replace(config, cache=CacheConfig(memory_bytes=1000))
    assert replica_config(told, 4).cache == told.cache


# Invalid configurations


@pytest.mark.parametrize("make", [LLM, AsyncEngine, Embedder])
def test_one_engine_is_not_several(make: Any) -> None:
    message = r"data_parallel_size=2: this class runs a single engine.*opweave serve"
    with pytest.raises(InvalidArgumentError, match=message):
        make(CHECKPOINT, config=parallel())


@pytest.mark.parametrize(
    "changes",
    [
        {"data_parallel_size": 0},
        {"data_parallel_size": True},
        {"data_parallel_address": "ray://head:10001"},
        {"data_parallel_address": "head"},
        {"data_parallel_address": 1},
        {"data_parallel_address": "head:6379"},  # without a data_parallel_size
    ],
)
def test_settings_that_are_wrong(changes: dict[str, Any]) -> None:
    with pytest.raises(
        SettingError, match=rf"{next(iter(changes))}={next(iter(changes.values()))!r}"
    ):
        ParallelConfig(**changes)


def test_what_is_wrong_shows_before_ray_is_started() -> None:
    group = ReplicasHere(2, lambda _: FakeEngine())
    config = replace(parallel(), kernel_config=KernelConfig(ir_op_priority={"rms_norm": ["wrong"]}))
    with pytest.raises(UnknownProviderError, match="wrong"):
        DataParallelEngine(CHECKPOINT, config=config, group=group)
    with pytest.raises(UnsupportedByPlatformError, match="float12"):
        DataParallelEngine(CHECKPOINT, config=replace(parallel(), dtype="float12"), group=group)
    with pytest.raises(ShardingError, match="cannot be divided over 3"):
        DataParallelEngine(CHECKPOINT, config=parallel(tensor_parallel_size=3), group=group)
    assert not group.orders
    group.close()


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"'ray'.*pip install 'opweave-engine\[ray\]'"):
        open_engine(CHECKPOINT, config=parallel())


def test_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "here")
    with pytest.raises(InvalidArgumentError, match="several processes were launched"):
        RayGroup(ParallelConfig(data_parallel_size=2))


SETTLING = """
    import threading
    from pathlib import Path
    from opweave import ir
    from opweave.config import EngineConfig
    from opweave_engine.parallel.ray import LoadOrder, load_engine

    order = LoadOrder({agreement!r}, Path({path!r}), EngineConfig(), "m", 1, 20)
    engine = load_engine(order, print)
    lists = []
    work = threading.Thread(target=lambda: lists.append(ir.ops.rms_norm.get_priority()))
    work.start()
    work.join()
    print(engine.model_name, lists[0][0], sorted(ir.current_registry().settings.required))
    engine.shutdown()
"""


def test_a_replica_selects_as_its_engine(fresh_python: FreshPython) -> None:
    """In all of its threads. It refuses the same agreements as a rank."""
    with ir.require("batch_invariant"), ir.priority(rms_norm=["native"]):
        agreement = Agreement.here().to_json()
    lines = fresh_python(SETTLING.format(agreement=agreement, path=str(CHECKPOINT))).stdout
    assert lines.splitlines()[-1] == "m native ['batch_invariant']"

"""Threads take turns with a language model."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, Thread
from typing import Any

import pytest

from models.tiny_checkpoints import Checkpoints, random_ids
from opweave_engine import LLM, SamplingParams
from opweave_engine.client import FairLock

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [random_ids(seed, 4 + seed) for seed in range(6)]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_who_waits_comes_before_who_has_just_had_a_turn() -> None:
    turns, order = FairLock(), []

    def wait() -> None:
        with turns.take():
            order.append("waited")

    with turns.take():
        thread = Thread(target=wait)
        thread.start()
        until(turns._next.locked)
    with turns.take():
        order.append("again")
    thread.join()
    assert order == ["waited", "again"]


def test_what_is_for_soon_waits_for_no_turn() -> None:
    turns, done = FairLock(), []
    turns.soon(lambda: done.append("at once"))
    assert done == ["at once"]
    with turns.take():
        turns.soon(lambda: done.append("afterwards"))
        assert done == ["at once"]
    assert done == ["at once", "afterwards"]


def test_threads_get_their_own_answers(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(checkpoint("llama")[0])
    wanted = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    execute, computes = llm._core.executor.execute, Lock()

    def alone(steps: Any) -> Any:
        assert computes.acquire(blocking=False), "two steps at once"
        try:
            time.sleep(0.001)  # the other threads go on
            return execute(steps)
        finally:
            computes.release()

    monkeypatch.setattr(llm._core.executor, "execute", alone)

    def ask(number: int) -> Any:
        if number % 2:
            return list(llm.stream(PROMPTS[number], GREEDY))[-1].outputs[0]
        return llm.generate(PROMPTS[number], GREEDY)[0].outputs[0]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, range(len(PROMPTS)))) == wanted
    llm._core.check_idle()


def test_a_stream_that_is_collected_in_the_middle_of_a_step(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(checkpoint("llama")[0])
    stream = llm.stream(PROMPTS[1], GREEDY)
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle
    execute = llm._core.executor.execute
    monkeypatch.setattr(llm._core.executor, "execute", lambda s: (gc.collect(), execute(s))[1])
    assert len(llm.generate(PROMPTS[2], GREEDY)[0].outputs[0].token_ids) == 10
    llm._core.check_idle()
    assert llm.stats().finished == {"abort": 1, "length": 1}


def test_a_shutdown_aborts_what_others_wait_for(checkpoint: Checkpoints) -> None:
    llm = LLM(checkpoint("llama")[0])
    stream = llm.stream(PROMPTS[1], GREEDY)
    next(stream)
    llm.shutdown()
    (last,) = stream
    assert last.outputs[0].finish_reason == "abort"

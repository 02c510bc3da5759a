"""Templates and I/O processors, which others wrote: they may never end, and must keep nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from opweave.config import EngineConfig
from opweave_engine import ChatTemplate, SamplingParams
from opweave_engine.daemon_threads import DaemonThreads
from opweave_engine.prompts import IOProcessor
from opweave_engine.server import ServerConfig
from server.conftest import Running, Start
from server.test_disconnect import ask
from server.test_errors import error_of
from server.test_limits import until

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "data": 1}
PATHS = ["/v1/chat/completions", "/tokenize", "/v1/process"]
CASES = [(path, False) for path in PATHS]


class Stuck:
    """Code that does not return until the test has ended."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.begun = 0

    def wait(self) -> None:
        self.begun += 1
        self.is_over.wait()


class StuckTemplate(ChatTemplate):
    def __init__(self, stuck: Stuck) -> None:
        super().__init__("", "a test", {})
        self._stuck = stuck

    def render(self, *_: Any, **__: Any) -> str:
        self._stuck.wait()
        return "x"


class StuckProcessor(IOProcessor):
    """One whose prompts, or whose results, do not come."""

    def __init__(self, stuck: Stuck, *, at_the_end: bool) -> None:
        super().__init__(EngineConfig())
        self._stuck, self._at_the_end = stuck, at_the_end

    def prompts(self, request: Any) -> list[str]:
        if not self._at_the_end:
            self._stuck.wait()
        return ["x"]

    def sampling_params(self, request: Any) -> SamplingParams:
        return SamplingParams(max_tokens=2)

    def result(self, request: Any, outputs: Any) -> Any:
        self._stuck.wait()
        return 1


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    made = Stuck()
    yield made
    made.is_over.set()


def server_with(stuck: Stuck, start: Start, *, at_the_end: bool = False, **limits: Any) -> Running:
    processor = StuckProcessor(stuck, at_the_end=at_the_end)
    return start(None, ServerConfig(**limits), StuckTemplate(stuck), processor)


@pytest.mark.parametrize(("path", "at_the_end"), [*CASES, ("/v1/process", True)])
def test_they_have_a_deadline(start: Start, stuck: Stuck, path: str, at_the_end: bool) -> None:
    server = server_with(stuck, start, at_the_end=at_the_end, request_timeout=0.5)
    assert error_of(server.post(path, BODY), 504)["code"] == "timeout"
    assert stuck.begun == 1
    until(lambda: server.state.admission.active == 0)
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_they_take_a_place_until_the_client_hangs_up(start: Start, stuck: Stuck, path: str) -> None:
    server = server_with(stuck, start, max_requests=1)
    connection = ask(server, path, BODY)
    until(lambda: stuck.begun == 1)
    assert server.state.admission.active == 1
    error_of(server.post(path, BODY), 429)
    connection.close()
    until(lambda: server.state.admission.active == 0)


def test_work_in_threads() -> None:
    threads = DaemonThreads(2, "a test")
    release, running = threading.Event(), []

    def work(number: int) -> int:
        running.append(threading.current_thread())
        release.wait()
        return 6 // number

    futures = [threads.submit(work, number) for number in (1, 2, 3, 0)]
    until(lambda: len(running) == 2)
    assert all(thread.daemon and thread.name == "a test" for thread in running)
    assert futures[2].cancel()
    release.set()
    assert [future.result(60) for future in futures[:2]] == [6, 3]
    with pytest.raises(ZeroDivisionError):
        futures[3].result(60)
    assert len(set(running)) <= 2
    until(lambda: not any(thread.is_alive() for thread in running))
    assert threads.submit(work, 6).result(60) == 1


def test_work_of_a_loop_that_has_ended() -> None:
    threads, release = DaemonThreads(1, "a test"), threading.Event()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.get_running_loop().run_in_executor(threads, release.wait)

    asyncio.run(give_up())
    release.set()
    assert threads.submit(int, "5").result(60) == 5

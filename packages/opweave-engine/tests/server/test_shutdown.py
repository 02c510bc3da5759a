"""SIGTERM loses no accepted request; a second one does not wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.test_limits import stalled
from support import TEST_ROOTS
from support.processes import wait_until

PATHS = os.pathsep.join(map(str, TEST_ROOTS))
PATH = "/v1/completions"

# Starts a server for each line that it reads, in a fork: importing torch takes seconds. Another
# fork waits for it, and writes down how it ended.
FORKS = """
import json, os, sys, time, traceback

from opweave_engine import ChatTemplate
from opweave_engine.server import ServerConfig, create_app, listen, run
from opweave_engine.server.run import url
from server.fake_engine import FakeEngine

class Endless(ChatTemplate):
    def render(self, *_, **__):
        print("rendering", flush=True)
        while True:
            time.sleep(60)

def serve(delay, drain):
    engine = FakeEngine(delay=delay)
    app = create_app(engine, ServerConfig(drain_timeout=drain), Endless("", "a test", {}))
    bound = listen("127.0.0.1", 0)
    run(app, bound, lambda: print(json.dumps([os.getpid(), url(bound)]), flush=True))
    assert not engine.is_running  # it was shut down
    print(len(engine.running), engine.finished, flush=True)

for line in sys.stdin:
    name, delay, drain = json.loads(line)
    if os.fork():
        continue
    if not (server := os.fork()):
        os.dup2(os.open(name + ".out", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(os.open(name + ".err", os.O_CREAT | os.O_WRONLY), 2)
        code = 1
        try:
            serve(delay, drain)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)  # freeing what torch holds takes a second
    _, status = os.waitpid(server, 0)
    with open(name + ".ends", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))
    os.rename(name + ".ends", name + ".code")
    os._exit(0)
"""


class Served:
    """A server in a process of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file("code").unlink(missing_ok=True)
        wait_until(lambda: "\n" in self._text("out") or self._file("code").exists(), 120)
        assert self._text("out"), self._text("err")
        self.pid, self.url = json.loads(self._text("out").splitlines()[0])
        self.client = httpx.Client(
            base_url=self.url, timeout=120, verify=False, trust_env=False,
            limits=httpx.Limits(max_connections=100),
        )  # fmt: skip

    @property
    def has_ended(self) -> bool:
        return self._file("code").exists()

    def stop(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.pid, number)

    @property
    def is_rendering(self) -> bool:
        return "rendering" in self._text("out")

    def running(self) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        line = next(each for each in lines if each.startswith("opweave_num_requests_running"))
        return float(line.split()[-1])

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return the exit code, the last line of the output, and the log."""
        wait_until(lambda: self.has_ended, 120)
        last = self._text("out").splitlines()[-1]
        return int(self._text("code")), last, self._text("err")

    def _file(self, kind: str) -> Path:
        return self._path.with_suffix(f".{kind}")

    def _text(self, kind: str) -> str:
        return self._file(kind).read_text() if self._file(kind).exists() else ""


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", FORKS], stdin=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": PATHS},
    ) as process:  # fmt: skip
        yield process


@pytest.fixture
def serve(forks: subprocess.Popen[str], tmp_path: Path) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(delay: float = 0.01, drain: float = 30.0) -> Served:
        path = tmp_path / f"server_{len(made)}"
        forks.stdin.write(json.dumps([str(path), delay, drain]) + "\n")
        forks.stdin.flush()
        made.append(Served(path))
        return made[-1]

    yield start
    for served in made:
        served.client.close()
        if not served.has_ended:
            served.stop(signal.SIGKILL)
            served.end()


def test_sigterm_under_load_loses_no_accepted_request(serve: Callable[..., Served]) -> None:
    served = serve(0.05)
    refused: list[int] = []
    stop = threading.Event()

    def ask(number: int) -> Any:
        body = {"prompt": f"x{number}", "max_tokens": 40, "stream": number % 2 == 0}
        return served.client.post(PATH, json=body)

    def keep_asking() -> None:
        with httpx.Client(base_url=served.url, timeout=5, trust_env=False) as client:
            while not stop.is_set():
                try:
                    refused.append(client.post(PATH, json={"prompt": "late"}).status_code)
                except httpx.TransportError:
                    return  # it has gone

    with ThreadPoolExecutor(40) as pool:
        answers = [pool.submit(ask, number) for number in range(30)]
        wait_until(lambda: served.running() >= 20)
        served.stop()
        wait_until(lambda: served.client.get("/health").status_code == 503)
        health = served.client.get("/health")
        pool.submit(keep_asking)
        done = [answer.result() for answer in answers]
        stop.set()
    code, out, err = served.end()
    assert (code, "Traceback" in err) == (0, False), err
    assert (health.status_code, health.json()["status"]) == (503, "shutting down")
    complete = [answer for answer in done if answer.status_code == 200]
    for answer in complete:
        if answer.headers["content-type"] == "application/json":
            assert answer.json()["usage"]["completion_tokens"] == 40
        else:
            events = answer.text.split("\n\n")
            assert events[-2] == "data: [DONE]"
            assert json.loads(events[-3][6:])["choices"][0]["finish_reason"] == "length"
    assert {answer.status_code for answer in done} <= {200, 503}
    assert len(complete) >= 20
    assert set(refused) == {503}
    assert out.startswith("0 ")
    assert f"'length': {len(complete)}, 'abort': 0" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once(serve: Callable[..., Served], number: int) -> None:
    served = serve()
    assert served.client.get("/health").status_code == 200  # its connection stays open
    served.stop(number)
    code, _, log = served.end()
    assert code == 0
    assert "taking no more" in log
    assert "timeout graceful shutdown exceeded" not in log  # which the connection would wait for


def test_what_takes_too_long_is_told(serve: Callable[..., Served]) -> None:
    served = serve(0.1, drain=0.3)
    body = {"prompt": "x", "max_tokens": 200}
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(served.client.post, PATH, json=body)
        stream = pool.submit(served.client.post, PATH, json={**body, "stream": True})
        wait_until(lambda: served.running() == 2)
        served.stop()
        error = whole.result()
        assert (error.status_code, error.json()["error"]["code"]) == (503, "shutting_down")
        events = stream.result().text.split("\n\n")
    assert events[-2] == "data: [DONE]"
    assert json.loads(events[-3][6:])["error"]["code"] == "shutting_down"
    assert served.end()[0] == 0


def test_a_client_that_reads_nothing(serve: Callable[..., Served]) -> None:
    served = serve(0.0, drain=0.1)
    with stalled((served.client.base_url.host, served.client.base_url.port or 0)):
        wait_until(lambda: served.running() == 1)
        wait_until(lambda: served.running() == 0)
        served.stop()
        code, _, log = served.end()
    assert (code, "Traceback" in log) == (0, False), log
    assert "64 answers have not finished" in log


def test_a_second_signal_stops_at_once(serve: Callable[..., Served]) -> None:
    served = serve(60)

    def ask() -> None:
        with pytest.raises(httpx.TransportError):
            served.client.post(PATH, json={"prompt": "x"})

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        wait_until(lambda: served.running() == 1)
        served.stop()
        wait_until(lambda: served.client.get("/health").status_code == 503)
        assert not served.has_ended
        served.stop()
        assert served.end()[0] == 128 + signal.SIGTERM
        asked.result()


def test_a_template_that_never_ends(serve: Callable[..., Served]) -> None:
    served = serve(drain=0.1)
    body = {"messages": [{"role": "user", "content": "x"}]}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.client.post, "/v1/chat/completions", json=body)
        wait_until(lambda: served.is_rendering)
        served.stop()
        code, _, log = served.end()
        error = asked.result()
    assert (error.status_code, error.json()["error"]["code"]) == (503, "shutting_down")
    assert code == 0
    assert "1 answers have not finished" in log

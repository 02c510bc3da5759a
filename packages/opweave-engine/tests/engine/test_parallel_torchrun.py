"""``opweave serve`` whose ranks ``torchrun`` has started, on one machine and on two."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from opweave_engine import LLM, SamplingParams
from server.fake_engine import CHECKPOINT

pytestmark = pytest.mark.slow  # importing torch three times takes a while
SOON = 100.0  # seconds; most of them for a machine that is busy
SERVED = re.compile(r"opweave serves tiny-pydoc on (http://127\.0\.0\.1:\d+)\n")
COMMAND = ("-m", "opweave", "serve", str(CHECKPOINT), "--port=0", "--tensor-parallel-size=2")


class Torchrun:
    """One ``torchrun``, of one machine."""

    def __init__(self, log: Path, *options: str) -> None:
        self.log, self._lines = log, list[str]()
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, *COMMAND],
                stdout=subprocess.PIPE, stderr=file, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def client(self) -> openai.OpenAI:
        self.wait_until(lambda: self._lines or self.process.poll() is not None)
        found = SERVED.fullmatch(self._lines[0] if self._lines else "")
        assert found, self.log.read_text()
        return openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0, timeout=SOON)

    def pid_of_rank(self, rank: int) -> int:
        """Return the process of a rank: a child, which torchrun told so in its environment."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        (found,) = (
            pid
            for pid in children.read_text().split()
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )
        return int(found)

    def wait_until(self, happened: Callable[[], object]) -> None:
        end = time.monotonic() + SOON
        while not happened():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(SOON)
        self._reader.join(SOON)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.append(line)


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Callable[..., Torchrun]]:
    started: list[Torchrun] = []

    def start(*options: str) -> Torchrun:
        started.append(Torchrun(tmp_path / f"{len(started)}.log", *options))
        return started[-1]

    yield start
    for each in started:
        each.close()


def complete(client: openai.OpenAI, count: int) -> str:
    answer: Any = client.completions.create(
        model="tiny-pydoc", prompt="Return the", max_tokens=count, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    text: str = answer.choices[0].text
    return text


def check_answers(client: openai.OpenAI) -> None:
    llm = LLM(CHECKPOINT)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    wanted = llm.generate("Return the", params)[0].outputs[0].text
    assert [model.id for model in client.models.list()] == ["tiny-pydoc"]
    assert complete(client, 24) == wanted
    with client.completions.create(
        model="tiny-pydoc", prompt="Return the", max_tokens=24, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    ) as pieces:  # fmt: skip
        assert "".join(piece.choices[0].text for piece in pieces) == wanted


def check_death(run: Torchrun, pid: int) -> None:
    """Kill a rank while an answer is waited for, which must be an error that says so."""
    client = run.client()
    os.kill(pid, signal.SIGSTOP)  # so that the answer cannot be there before
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, client, 24)
        run.wait_until(lambda: running(client))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.InternalServerError, match="The engine does not run") as refused:
            waiting.result(SOON)
    assert (refused.value.status_code, refused.value.code) == (503, "engine_dead")


def running(client: openai.OpenAI) -> float:
    """Return how many requests are worked on."""
    url = str(client.base_url).removesuffix("/v1/")
    lines = client._client.get(f"{url}/metrics").text.splitlines()
    (line,) = (each for each in lines if each.startswith("opweave_num_requests_running"))
    return float(line.split()[-1])


def test_two_machines(torchrun: Callable[..., Torchrun]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1")
    runs = [torchrun(*options, f"--master-port={port}", f"--node-rank={n}") for n in (0, 1)]
    check_answers(runs[0].client())
    check_death(runs[0], runs[1].pid_of_rank(1))
    assert runs[0].process.wait(SOON) != 0  # whose own processes are all well
    assert runs[1].process.wait(SOON) != 0
    log = runs[0].log.read_text()
    assert "RankFailedError: rank 1 died" in log
    assert "opweave: the engine died: rank 1 died: it closed its connection." in log


def test_sigterm_ends_all_ranks(torchrun: Callable[..., Torchrun]) -> None:
    run = torchrun("--standalone", "--nproc-per-node=2")
    client = run.client()
    pids = [run.pid_of_rank(rank) for rank in (0, 1)]
    os.kill(pids[1], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, client, 24)
        run.wait_until(lambda: running(client))
        run.process.send_signal(signal.SIGTERM)
        run.wait_until(lambda: "SIGTERM: finishing 1 answers" in run.log.read_text())
        os.kill(pids[1], signal.SIGCONT)
        assert answer.result(SOON)
    run.process.wait(SOON)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

"""vLLM's server answers the same with and without opweave's kernels."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import IO, Any

import pytest
from test_greedy import environment

CHECKPOINT = Path(__file__).parents[4] / "examples" / "models" / "tiny-pydoc"
PROMPTS = ["Return a list of", "Raises an exception", "x"]
OPS = ["linear", "paged_attention", "rms_norm"]
START_LIMIT, REPORT_LIMIT = 600, 60  # seconds


def request(port: int, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}{path}"
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=300) as answer:
        content: bytes = answer.read()
    return content


def await_start(server: subprocess.Popen[str], port: int, log: Path) -> None:
    limit = time.monotonic() + START_LIMIT
    while time.monotonic() < limit:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            request(port, "/health")
            return
        except OSError:
            time.sleep(1)
    raise TimeoutError(log.read_text()[-4000:])


def await_report(log: Path) -> None:
    """Wait until the process that runs the model has printed its kernels."""
    limit = time.monotonic() + REPORT_LIMIT
    while not all(runs(op, log.read_text()) for op in OPS):
        assert time.monotonic() < limit, log.read_text()[-4000:]
        time.sleep(1)


def runs(op: str, log: str) -> bool:
    """Whether a report in *log* has a row for *op* with opweave's kernel."""
    return any(f"{op} opweave_c " in " ".join(line.split()) for line in log.splitlines())


def start(seams: str, port: int, folder: Path, log: IO[str]) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(CHECKPOINT)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "4"),
    ]
    return subprocess.Popen(
        command,
        env=environment(folder, seams),
        stdout=log,
        stderr=log,
        text=True,
        start_new_session=True,
    )


def serve(seams: str, folder: Path) -> list[dict[str, Any]]:
    """Return the completions of a server, after its report has shown opweave's kernels, if any."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = folder / f"{seams}.log"
    with path.open("w") as log:
        server = start(seams, port, folder, log)
        try:
            await_start(server, port, path)
            body = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 16, "temperature": 0}
            answer = json.loads(request(port, "/v1/completions", {**body, "logprobs": 1}))
            if seams != "none":
                await_report(path)
            server.send_signal(signal.SIGINT)
            server.wait(timeout=120)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


def test_server_answers_the_same_and_reports_its_kernels(tmp_path: Path) -> None:
    alone = serve("none", tmp_path)
    found = serve("all", tmp_path)
    assert [choice["text"] for choice in found] == [choice["text"] for choice in alone]
    for ours, theirs in zip(found, alone, strict=True):
        logprobs = [choice["logprobs"]["token_logprobs"] for choice in (ours, theirs)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)

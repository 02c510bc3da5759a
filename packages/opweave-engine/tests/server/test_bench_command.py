"""``opweave bench serve``: what it sends, what it measures, how it fails."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from threading import Thread
from typing import Any

import pytest

from opweave.cli import main
from opweave.cli.output import CliError
from opweave_engine.cli.bench_serve import Answer, Load, arrivals, prompts, summarize
from opweave_engine.server import ServerConfig
from server.conftest import Start
from server.fake_engine import CONTEXT, FakeEngine

pytestmark = pytest.mark.timeout(100)
SMALL = ("--rate=inf", "--prompt-length=8", "--max-tokens=5", "--json")


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "serve", *arguments])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def test_every_request_is_sent_and_measured(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(delay=0.02)
    server = start(engine)
    code, out, err = bench(capsys, server.url, "--requests=7", *SMALL)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["model"], found["completed"], found["errors"]) == ("tiny-pydoc", 7, {})
    assert found["load"]["rate"] == "inf"
    assert len({tuple(call.prompt) for call in engine.calls}) == 7
    assert found["prompt_tokens"] == sum(len(call.prompt) for call in engine.calls)
    assert found["output_tokens"] == 7 * 5
    assert all(call.params.ignore_eos and call.params.max_tokens == 5 for call in engine.calls)
    assert engine.most_running == 7
    times = found["milliseconds"]
    assert times["ttft"]["p50"] >= 20
    assert times["tpot"]["mean"] >= 15
    assert times["e2e"]["p50"] >= 100
    for values in times.values():
        assert 0 < values["p50"] <= values["p90"] <= values["p99"]
    whole = found["output_throughput"] * found["seconds"]
    assert whole == pytest.approx(found["output_tokens"])


def test_prompts_of_token_ids(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    server = start(engine)
    code, out, _ = bench(capsys, server.url, "--requests=3", "--vocab-size=40", *SMALL)
    assert (code, json.loads(out)["prompt_tokens"]) == (0, 3 * 8)
    assert all(0 <= token < 40 for call in engine.calls for token in call.prompt)


def test_figures_for_people(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    server = start(config=ServerConfig(api_keys=("k",)))
    arguments = (f"{server.url}/v1", "--requests=2", "--rate=inf", "--max-tokens=2")
    code, out, _ = bench(capsys, *arguments, "--api-key=k")
    assert code == 0
    assert "model tiny-pydoc: 2 answers in" in out
    assert "ttft: time to first token" in out
    code, out, err = bench(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "401" in err


def test_failed_requests_are_counted_by_reason(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    server = start(engine)
    code, out, _ = bench(
        capsys, server.url, "--requests=3", "--rate=inf", f"--max-tokens={CONTEXT}", "--json"
    )
    found = json.loads(out)
    assert (code, found["completed"], sum(found["errors"].values())) == (1, 0, 3)
    assert all(reason.startswith("400: ") for reason in found["errors"])
    assert found["milliseconds"] == {}
    code, out, _ = bench(capsys, server.url, "--requests=2", "--model=other", "--rate=inf")
    assert code == 1
    assert "2 failed: 404: " in out
    engine.fails_after = 2
    code, out, _ = bench(capsys, server.url, "--requests=2", *SMALL)
    found = json.loads(out)
    assert (code, found["completed"], sum(found["errors"].values())) == (1, 0, 2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nowhere",), "'nowhere' should be a server's URL"),
        (("http://127.0.0.1:1",), "http://127.0.0.1:1 does not list its models"),
        (("http://a:b",), "'http://a:b' is not a URL"),
        (("http://127.0.0.1:99999",), "has the port 99999"),
        (("http://127.0.0.1:1", "--api-key=\u65e5"), "An API key contains characters"),
        (("http://127.0.0.1:1", "--requests=1.5"), "--requests"),
        (("http://127.0.0.1:1", "--requests=0"), "--requests must be at least 1"),
        (("http://127.0.0.1:1", "--prompt-length=0"), "--prompt-length must be at least 1"),
        (("http://127.0.0.1:1", "--vocab-size=0"), "--vocab-size must be at least 1"),
        (("http://127.0.0.1:1", "--rate=nan"), "--rate must be a positive number"),
        (("http://127.0.0.1:1", "--timeout=0"), "--timeout must be positive"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = bench(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert named in err


def test_httpx_is_optional(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    code, _, err = bench(capsys, "http://127.0.0.1:1")
    assert code == 2
    assert "pip install 'opweave-engine[bench]'" in err


class Odd(BaseHTTPRequestHandler):
    """Answers as no server should."""

    body = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": []}')

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def odd() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Odd) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "the stream ended before [DONE]"),
        (b"data: {\n\n", "an event is not a completion"),
        (b'data: {"usage": {"prompt_tokens": 1}}\n\n', "an event is not a completion"),
        (b'data: {"error": {"message": "it broke"}}\n\n', "it broke"),
        (b"data: 7\n\n", "an event is not a completion"),
    ],
)
def test_streams_that_are_none(
    odd: str,
    body: bytes,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Odd, "body", body)
    code, out, _ = bench(capsys, odd, "--model=m", "--requests=1", *SMALL)
    assert code == 1
    ((found, count),) = json.loads(out)["errors"].items()
    assert (found.startswith(reason), count) == (True, 1)


def test_a_server_without_models(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = bench(capsys, odd)
    assert (code, "is not a list of models" in err) == (2, True)


# The requests that are sent


def test_arrivals_are_a_poisson_process() -> None:
    load = Load(requests=4001, rate=50.0, prompt_length=1, max_tokens=1, seed=3)
    times = arrivals(load)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.15)  # as its mean: exponential
    assert arrivals(load) == times
    assert arrivals(Load(4001, 50.0, 1, 1, seed=4)) != times


def test_prompts_follow_from_the_seed_alone() -> None:
    load = Load(requests=20, rate=1.0, prompt_length=30, max_tokens=1)
    found = prompts(load)
    assert found == prompts(Load(20, 9.0, 30, 5))
    assert found != prompts(Load(20, 1.0, 30, 1, seed=1))
    assert {len(str(prompt).split()) for prompt in found} == {30}
    assert len({str(prompt)[:40] for prompt in found}) == 20
    ids = prompts(Load(20, 1.0, 30, 1, vocab_size=7))
    assert {len(prompt) for prompt in ids} == {30}
    assert {token for prompt in ids for token in prompt} == set(range(7))
    with pytest.raises(CliError, match="--max-tokens must be at least 1; it is -1"):
        Load(1, 1.0, 1, -1)


def test_figures_of_known_answers() -> None:
    answers = [
        Answer(0.0, [0.1, 0.2, 0.4], prompt_tokens=5, output_tokens=3, ended=0.5),
        Answer(1.0, [1.3], prompt_tokens=7, output_tokens=1, ended=1.4),
        Answer(1.0, [1.1], ended=1.2, error="429: full"),
        Answer(1.0, [], ended=1.2, error="429: full"),
    ]
    found = summarize(answers, 2.0)
    assert (found.completed, found.errors) == (2, {"429: full": 2})
    assert (found.prompt_tokens, found.output_tokens) == (12, 4)
    rates = found.request_throughput, found.output_throughput, found.total_throughput
    assert rates == (1.0, 2.0, 8.0)
    assert found.milliseconds["ttft"]["mean"] == pytest.approx(200)
    assert found.milliseconds["ttft"]["p90"] == pytest.approx(280)
    assert found.milliseconds["itl"]["p50"] == pytest.approx(150)
    assert found.milliseconds["tpot"]["p99"] == pytest.approx(150)
    assert found.milliseconds["e2e"]["p50"] == pytest.approx(450)

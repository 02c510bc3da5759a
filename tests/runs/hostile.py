"""Sends hostile requests to ``opweave serve``, and measures what other clients notice.

    python tests/runs/hostile.py [--minutes 15] [--seed 0] [--megabytes 15] [--kind KIND] [--json]

One process sends bodies of one kind after the other, see ``hostile_bodies.py``. Meanwhile a client
streams answers, a prober asks /health, and the memory of the server's processes is summed up.
The exit status is 1 if a limit of LIMITS is broken, or if a request gets an undocumented 5xx or no
answer. Latencies depend on the machine's other load, and a kind's latencies also on slow requests
of the kind before it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import resource
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from hostile_bodies import ALL_KINDS, COMPLETIONS, Body

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "packages/opweave-engine/tests"))

from server.command import Command

CHECKPOINT = "examples/models/tiny-pydoc"
# Without the tools' schemas: a prompt that is too long is refused before its grammar is compiled.
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{{ tools | length if tools }}"
OPTIONS = (f"--chat-template={TEMPLATE}", "--tool-call-parser=hermes", "--log-level=ERROR")
LIMITS = {"health": 1.0, "growth": 1e9, "latency": 5.0}  # seconds, bytes, times the idle value
SENDERS = 3  # threads
PAUSE = 0.05  # seconds between two requests of a sender
ROUND = 5.0  # seconds after which new bodies are built
TIMEOUT = 60.0  # seconds for an answer
REPORTED = 5  # examples per kind
EXCEPTION = re.compile(r"^Traceback \(.*\n(?:(?: .*)?\n)*(\S.*)", re.M)  # in the server's log


def connect(url: str, timeout: float = TIMEOUT) -> HTTPConnection:
    return HTTPConnection(url.removeprefix("http://"), timeout=timeout)


def send(url: str, body: Body) -> tuple[str, bytes]:
    """Send a request; return the status or another outcome, and the end of the answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    headers = {
        "Host": host,
        "Connection": "close",
        "Content-Type": "application/json",
        **({} if "Transfer-Encoding" in body.headers else {"Content-Length": len(body.content)}),
        **body.headers,
    }
    lines = [f"POST {body.path} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
    start, end = b"", b""
    with socket.create_connection((host, int(port)), TIMEOUT) as connection:
        with suppress(ConnectionError):  # refused before it is read: the answer may be there
            connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body.content)
        if body.cancel_after is not None:
            time.sleep(body.cancel_after)
            return "cancelled", b""
        try:
            while part := connection.recv(2**16):
                start, end = start or part, (end + part)[-1000:]
        except TimeoutError:
            return "no answer in time", end
        except ConnectionError:  # a close with a part of the body unread loses the answer
            return start[9:12].decode("latin-1") or "reset", end
    status = start[9:12].decode("latin-1") or "closed"
    if status == "200" and (b'"server_error"' in end or b'"engine_dead"' in end):
        return "500 in a stream", end
    return status, end


def is_fault(status: str, end: bytes) -> bool:
    """Whether an answer is one that the documentation does not allow."""
    if status == "503":
        return b'"engine_dead"' in end
    return status in ("closed", "no answer in time") or (status[:1] == "5" and status != "504")


class Sender:
    """Sends bodies in threads, in a process of its own."""

    def __init__(self, url: str, limit: int, random: Random) -> None:
        self._url, self._limit, self._random = url, limit, random
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.faults: defaultdict[str, list[str]] = defaultdict(list)

    def round(self, kind: str, until: float) -> None:
        """Send bodies of one kind until a time; those sent last may be answered later."""
        draw, started, size = ALL_KINDS[kind], time.monotonic(), 0
        bodies: list[Body] = []
        while not bodies or (len(bodies) < 200 and size < 2 * self._limit):
            bodies.append(draw(self._random, self._limit))
            size += len(bodies[-1].content)
            if time.monotonic() > started + min(0.2, (until - started) / 3):
                break
        threads = [
            threading.Thread(target=self._send, args=(kind, bodies[start:] + bodies[:start], until))
            for start in range(0, len(bodies), -(-len(bodies) // SENDERS))
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        self._threads = [thread for thread in self._threads if thread.is_alive()] + threads
        time.sleep(max(0.0, until - time.monotonic()))

    def _send(self, kind: str, bodies: list[Body], until: float) -> None:
        index = 0
        while index == 0 or time.monotonic() < until:
            body = bodies[index % len(bodies)]
            try:
                status, end = send(self._url, body)
            except OSError as error:
                status, end = f"not connected: {error}", b""
            with self._lock:
                self.answers[kind][status] += 1
                if is_fault(status, end):
                    self.faults[kind].append(f"{status} for {body} answer: {end[-300:]!r}")
            index += 1
            time.sleep(PAUSE)

    def wait(self) -> None:
        """Wait for the last answers."""
        for thread in self._threads:
            thread.join(TIMEOUT + 1)


def send_kinds(parent: Connection, url: str, limit: int, seed: int) -> None:
    """Send bodies of the kinds that *parent* names, each for some seconds; None is the end."""
    sender = Sender(url, limit, Random(seed))
    while (task := parent.recv()) is not None:
        kind, seconds = task
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            sender.round(kind, min(end, now + ROUND))
        parent.send(dict(sender.answers[kind]))
    sender.wait()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    faults = {kind: examples[:REPORTED] for kind, examples in sender.faults.items()}
    parent.send((dict(sender.answers), faults, usage.ru_utime + usage.ru_stime))


class Observer:
    """Streams answers, asks /health and sums up memory, in threads.

    Attributes:
        gaps: times of a token and seconds since the one before it in its stream.
        health: times at which /health was asked, and seconds until it answered.
        memory: times, and bytes of the server's processes.
        children: the same without the first process.
        failures: answers that a normal client should not get.
    """

    def __init__(self, url: str, pid: int) -> None:
        self.gaps: list[tuple[float, float]] = []
        self.health: list[tuple[float, float]] = []
        self.memory: list[tuple[float, float]] = []
        self.children: list[tuple[float, float]] = []
        self.failures: Counter[str] = Counter()
        self._url, self._pid = url, pid
        self._is_done = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(action, pause))
            for action, pause in ((self._stream, 0.0), (self._probe, 0.1), (self._measure, 0.2))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_done.set()
        for thread in self._threads:
            thread.join(TIMEOUT + 1)

    def _repeat(self, action: Any, pause: float) -> None:
        while not self._is_done.is_set():
            try:
                action()
            except (OSError, HTTPException) as error:
                self.failures[f"{action.__name__[1:]}: {error!r}"] += 1
                self._is_done.wait(1)
            self._is_done.wait(pause)

    def _stream(self) -> None:
        request = {"prompt": "Return a list of", "max_tokens": 200, "ignore_eos": True}
        connection = connect(self._url)
        connection.request(
            "POST", COMPLETIONS, json.dumps({**request, "stream": True}),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        answer = connection.getresponse()
        before, is_complete = 0.0, False
        while not self._is_done.is_set() and (line := answer.readline()):
            now = time.monotonic()
            if line.startswith(b"data: {"):
                if before:
                    self.gaps.append((now, now - before))
                before = now
            is_complete = is_complete or line.startswith(b"data: [DONE]")
        if not self._is_done.is_set() and not (answer.status == 200 and is_complete):
            self.failures[f"stream: {answer.status}"] += 1
        connection.close()

    def _probe(self) -> None:
        started = time.monotonic()
        try:
            connection = connect(self._url)
            connection.request("GET", "/health")
            status = connection.getresponse().status
            connection.close()
        finally:
            self.health.append((started, time.monotonic() - started))
        if status != 200:
            self.failures[f"health: {status}"] += 1

    def _measure(self) -> None:
        sizes = [anonymous_bytes(pid) for pid in processes(self._pid)]
        self.memory.append((now := time.monotonic(), sum(sizes)))
        self.children.append((now, sum(sizes[1:])))


def processes(root: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    children = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            children[int(path.read_text().rpartition(")")[2].split()[1])].append(path.parent.name)
    pending = [root]
    while pending:
        yield (pid := pending.pop())
        pending += map(int, children[pid])


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process without files, which processes share."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = ("RssAnon:", "RssShmem:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(fields))


def during(series: list[tuple[float, float]], start: float, end: float) -> list[float]:
    """Return the values of the times from *start* to *end*, or 0 without any."""
    return [value for at, value in series if start <= at <= end] or [0.0]


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def measures(observer: Observer, start: float, end: float) -> dict[str, float]:
    gaps = during(observer.gaps, start, end)
    return {
        "health": max(during(observer.health, start, end)),
        "growth": max(during(observer.memory, start, end)) - observer.memory[0][1],
        "children": max(during(observer.children, start, end)),
        "p50": percentile(gaps, 0.5),
        "p99": percentile(gaps, 0.99),
        "tokens": len(gaps),
    }


def text(values: dict[str, float]) -> str:
    return (
        f"/health {values['health']:6.3f} s, memory {values['growth'] / 1e6:+6.0f} MB "
        f"(children {values['children'] / 1e6:4.0f} MB), "
        f"p50 {values['p50'] * 1e3:5.1f} ms, p99 {values['p99'] * 1e3:6.1f} ms"
    )


def run(command: Command, options: argparse.Namespace) -> dict[str, Any]:
    """Send all kinds, and return the report."""
    seconds = options.minutes * 60
    observer = Observer(command.url, command.process.pid)
    parent, child = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    task = (child, command.url, int(options.megabytes * 1e6), options.seed)
    sender = context.Process(target=send_kinds, args=task, daemon=True)
    sender.start()
    child.close()  # so that recv fails if the process ends
    time.sleep(1.0)  # the first answers, and the start of the process
    start = time.monotonic()
    time.sleep(max(2.0, min(20.0, seconds / 10)))
    idle = measures(observer, start, time.monotonic())
    show = sys.stderr if options.json else sys.stdout
    print(f"{'idle':20} {text(idle)}", file=show, flush=True)
    kinds: dict[str, dict[str, Any]] = {}
    start = time.monotonic()
    for kind in options.kind or ALL_KINDS:
        kind_start = time.monotonic()
        parent.send((kind, seconds / len(options.kind or ALL_KINDS)))
        answers = parent.recv()
        kinds[kind] = measures(observer, kind_start, time.monotonic())
        line = f"{kind:20} {text(kinds[kind])}, answers {dict(sorted(answers.items()))}"
        print(line, file=show, flush=True)
    parent.send(None)
    all_answers, faults, cpu_seconds = parent.recv()
    end = time.monotonic()
    observer.stop()  # the last /health included
    total = measures(observer, start, end)
    sender.join(10)
    latency = total["p99"] / idle["p99"] if idle["p99"] else float("inf")
    broken = [
        *(f"{kind}: requests that got an undocumented status or no answer" for kind in faults),
        *(f"{failure} ({count} times)" for failure, count in observer.failures.items()),
    ]
    for name, value in {**total, "latency": latency}.items():
        if value > LIMITS.get(name, float("inf")):
            broken.append(f"{name} {value:.4g} exceeds {LIMITS[name]:g}")
    if command.process.poll() is not None:
        broken.append(f"the server ended with {command.process.returncode}")
    statuses: Counter[str] = sum(all_answers.values(), Counter())
    exceptions = Counter(EXCEPTION.findall(command.log.read_text(errors="replace")))
    return {
        "idle": idle, "total": total, "latency": latency, "kinds": kinds, "statuses": statuses,
        "answers": all_answers, "faults": faults, "broken": broken,
        "sender_cpu_share": cpu_seconds / (end - start), "exceptions": exceptions,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15, help="time of all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="of the bodies")
    parser.add_argument("--megabytes", type=float, default=15, help="size of the largest body")
    parser.add_argument(
        "--kind", action="append", choices=[*ALL_KINDS], help="only this; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = Command(Path(folder), CHECKPOINT, "--port=0", *OPTIONS)
        try:
            report = run(command, options)
        finally:
            command.close()
    if options.json:
        print(json.dumps(report))
    else:
        print(f"{'total':20} {text(report['total'])}, {report['latency']:.1f} x the idle p99")
        print(f"answers by status: {dict(sorted(report['statuses'].items()))}")
        print(f"CPU share of the senders: {report['sender_cpu_share']:.2f}")
        print(f"exceptions in the server's log: {dict(report['exceptions'])}")
        for kind, examples in report["faults"].items():
            print(f"faults of {kind}:", *examples, sep="\n  ")
        print(*(f"LIMIT BROKEN: {line}" for line in report["broken"]), sep="\n")
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())

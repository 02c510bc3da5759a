"""``opweave bench serve``: load-test a running server."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from cyclopts import Parameter
from rich.markup import escape
from rich.table import Table

from opweave.cli.options import Flag
from opweave.cli.output import CliError, PlainTable, out, print_json, progress_bar
from opweave.config.values import api_key_fault
from opweave_engine.errors import require

if TYPE_CHECKING:
    from httpx import AsyncClient


# Prompts and arrival times of a load test, determined by a seed.


# Common words, nearly all one token in any vocabulary.
_WORDS = (
    "the", "of", "and", "to", "in", "that", "is", "was", "he", "for", "it", "with", "as", "his",
    "on", "be", "at", "by", "had", "not", "are", "but", "from", "or", "have", "they", "which",
    "one", "you", "were", "all", "her", "she", "there", "would", "their", "we", "him", "been",
    "has", "when", "who", "will", "no", "more", "if", "out", "so", "up", "said", "what", "about",
    "than", "into", "them", "can", "only", "other", "time", "new", "some", "could", "these", "two",
)  # fmt: skip


@Parameter(name="*")
@dataclass(frozen=True)
class Load:
    """A Poisson process of requests, independent of the responses.

    A number that is out of range raises CliError.

    Parameters
    ----------
    requests
        Number of requests.
    rate
        Mean number of requests per second; inf sends all at once.
    prompt_length
        Words per prompt. They are random, so that prompts miss the server's prefix cache.
    max_tokens
        Tokens per answer.
    ignore_eos
        Ask for answers of exactly that length; not every server supports this field.
    vocab_size
        Send token ids below this number instead of words, for a model without a tokenizer.
    seed
        Seed of the prompts and arrival times.
    """

    requests: int = 100
    rate: float = 4.0
    prompt_length: int = 64
    max_tokens: int = 64
    ignore_eos: bool = True
    vocab_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_length", "max_tokens", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = name.replace("_", "-")
                raise CliError(f"--{option} must be at least 1; it is {value}.")
        if not self.rate > 0:
            raise CliError(
                f"--rate must be a positive number, or inf for all at once; it is {self.rate}."
            )


def arrivals(load: Load) -> list[float]:
    """Return the arrival time of each request in seconds; the first is 0."""
    if math.isinf(load.rate):
        return [0.0] * load.requests
    draw = random.Random(load.seed)
    gaps = (draw.expovariate(load.rate) for _ in range(load.requests - 1))
    return [0.0, *accumulate(gaps)]


def prompts(load: Load) -> Sequence[str | list[int]]:
    """Return the prompt of each request: text or token ids."""
    # A separate generator, so that prompts do not depend on the rate.
    draw, length = random.Random(f"prompts {load.seed}"), load.prompt_length
    if load.vocab_size is not None:
        ids = range(load.vocab_size)
        return [draw.choices(ids, k=length) for _ in range(load.requests)]
    return [" ".join(draw.choices(_WORDS, k=length)) for _ in range(load.requests)]


# Client that streams completions and records the time of every event.


@dataclass
class Answer:
    """Response to one request. Times are seconds since the start of the run.

    Attributes:
        sent: time when the request was sent.
        events: time of each event; the first may be empty, the others have text.
        prompt_tokens, output_tokens: as counted by the server.
        ended: time when the answer was complete.
        error: why the request failed, or None.
    """

    sent: float
    events: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    ended: float = 0.0
    error: str | None = None


class _FailedError(Exception):
    """A request failed; the others continue."""


class Client:
    """A client of an OpenAI-compatible server.

    Args:
        url: URL of the server, with or without ``/v1``.
        api_key: the server's key, if it requires one.
        timeout: seconds without data after which a request fails.

    Raises:
        CliError: *url*, *timeout* or *api_key* is not valid.
        MissingDependencyError: httpx is not installed.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        if not timeout > 0:
            raise CliError(f"--timeout must be positive; it is {timeout}.")
        self._httpx = httpx = require("httpx", "bench")
        try:
            base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
        except httpx.InvalidURL as error:
            raise CliError(f"{url!r} is not a URL: {error}.") from error
        if base.scheme not in ("http", "https") or not base.host:
            raise CliError(f"{url!r} should be a server's URL, such as http://127.0.0.1:8000.")
        if base.port is not None and not 0 < base.port < 65536:
            raise CliError(f"{url!r} has the port {base.port}; ports are 1 to 65535.")
        if (fault := api_key_fault(api_key or "")) is not None:
            raise CliError(fault)
        self.url = str(base)
        self._client: AsyncClient = httpx.AsyncClient(
            base_url=base,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def model(self) -> str:
        """Return the name of the server's first model.

        Raises:
            CliError: the server cannot be reached, refuses, or does not list a model.
        """
        try:
            response = await self._client.get("/v1/models")
            if not response.is_success:
                raise _FailedError(_refusal(response.status_code, response.content))
            return str(response.json()["data"][0]["id"])
        except (_FailedError, self._httpx.HTTPError) as error:
            raise CliError(f"{self.url} does not list its models: {_described(error)}.") from error
        except (ValueError, LookupError, TypeError) as error:
            raise CliError(f"{self.url}/v1/models is not a list of models: {error!r}.") from error

    async def run(
        self, model: str, load: Load, progress: Callable[[int, int], None]
    ) -> tuple[list[Answer], float]:
        """Send all requests at their arrival times.

        Args:
            model: name of the model.
            load: the requests.
            progress: called with the number of finished and of all requests.

        Returns:
            The answers in the order of the requests, and the duration in seconds.
        """
        start, done = time.perf_counter(), 0
        progress(0, load.requests)

        async def answer(at: float, prompt: str | list[int]) -> Answer:
            nonlocal done
            await asyncio.sleep(start + at - time.perf_counter())
            result = await self._answer(_body(model, prompt, load), start)
            done += 1
            progress(done, load.requests)
            return result

        requests = zip(arrivals(load), prompts(load), strict=True)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(at, prompt)) for at, prompt in requests]
        return [task.result() for task in tasks], time.perf_counter() - start

    async def _answer(self, body: dict[str, Any], start: float) -> Answer:
        answer = Answer(sent=time.perf_counter() - start)
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if not response.is_success:
                    raise _FailedError(_refusal(response.status_code, await response.aread()))
                is_done = False
                async for line in response.aiter_lines():
                    is_done = is_done or _take(answer, line, time.perf_counter() - start)
            if not is_done:
                raise _FailedError("the stream ended before [DONE]")
        except (_FailedError, self._httpx.HTTPError) as error:
            answer.error = _described(error)
        answer.ended = time.perf_counter() - start
        return answer


def _body(model: str, prompt: str | list[int], load: Load) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if load.ignore_eos else {}),
    }


def _take(answer: Answer, line: str, now: float) -> bool:
    """Process a line of an event stream; return whether it is the last one."""
    name, _, data = line.partition(":")
    data = data.strip()
    if name != "data" or data == "[DONE]":
        return data == "[DONE]"
    try:
        event = json.loads(data)
        if error := event.get("error"):
            raise _FailedError(str(error.get("message", error)))
        if event.get("choices"):
            answer.events.append(now)
        if usage := event.get("usage"):
            answer.prompt_tokens = int(usage["prompt_tokens"])
            answer.output_tokens = int(usage["completion_tokens"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _FailedError(f"an event is not a completion: {error!r}") from error
    return False


def _refusal(status: int, content: bytes) -> str:
    try:
        message = json.loads(content)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = content[:200].decode("utf-8", "replace")
    return f"{status}: {message}"


def _described(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__


# Statistics of a load test.


PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Summary:
    """Latency and throughput of a server under load.

    Attributes:
        seconds: time from the first request to the last answer.
        completed: number of requests with an answer.
        errors: number of failed requests by reason.
        prompt_tokens, output_tokens: tokens of the completed requests.
        request_throughput: completed requests per second.
        output_throughput: generated tokens per second.
        total_throughput: prompt and generated tokens per second.
        milliseconds: mean and percentiles of ``ttft`` (time to first token), ``itl`` (time between
        two events of a stream), ``tpot`` (time per token after the first) and ``e2e`` (end-to-end
        latency), if there are any.
    """

    seconds: float
    completed: int
    errors: Mapping[str, int]
    prompt_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    milliseconds: Mapping[str, Mapping[str, float]]


def summarize(answers: Sequence[Answer], seconds: float) -> Summary:
    """Return the statistics of *answers*, received within *seconds*."""
    good = [answer for answer in answers if answer.error is None]
    failed = Counter(answer.error for answer in answers if answer.error is not None)
    prompt = sum(answer.prompt_tokens for answer in good)
    output = sum(answer.output_tokens for answer in good)
    streamed = [answer for answer in good if answer.events]
    times = {
        "ttft": [answer.events[0] - answer.sent for answer in streamed],
        "itl": [b - a for answer in streamed for a, b in pairwise(answer.events)],
        "tpot": [
            (answer.events[-1] - answer.events[0]) / (answer.output_tokens - 1)
            for answer in streamed
            if answer.output_tokens > 1
        ],
        "e2e": [answer.ended - answer.sent for answer in good],
    }
    return Summary(
        seconds,
        len(good),
        dict(failed.most_common()),
        prompt,
        output,
        len(good) / seconds,
        output / seconds,
        (prompt + output) / seconds,
        {name: _distribution(values) for name, values in times.items() if values},
    )


def _distribution(values: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles, in milliseconds."""
    percentiles = zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    return {
        "mean": statistics.fmean(values) * 1e3,
        **{f"p{percent}": float(value) * 1e3 for percent, value in percentiles},
    }


# The command.


_LOAD = Load()
_TIME_LABELS = {
    "ttft": "time to first token",
    "itl": "between two events",
    "tpot": "per token after the first",
    "e2e": "whole answer",
}


def serve(
    url: str,
    /,
    *,
    model: str | None = None,
    load: Load = _LOAD,
    timeout: float = 600.0,
    api_key: str | None = None,
    json: Flag = False,
) -> int:
    """Load-test an OpenAI-compatible server with completion requests.

    Requests arrive as a Poisson process, independently of the responses. Exits with 1 if a request
    failed.

    Parameters
    ----------
    url
        URL of the server, such as http://127.0.0.1:8000.
    model
        Name of the model. The default is the server's first model.
    timeout
        Seconds without data after which a request fails.
    api_key
        API key of the server, if it requires one.
    json
        Print JSON.
    """
    client = Client(url, api_key=api_key, timeout=timeout)
    name, summary = asyncio.run(_measure(client, model, load))
    if json:
        rate = "inf" if math.isinf(load.rate) else load.rate  # JSON has no infinity
        options = {**asdict(load), "rate": rate}
        print_json({"url": client.url, "model": name, "load": options, **asdict(summary)})
    else:
        _print(client.url, name, summary)
    return 1 if summary.errors else 0


async def _measure(client: Client, model: str | None, load: Load) -> tuple[str, Summary]:
    async with aclosing(client):
        name = model or await client.model()
        with progress_bar("answers") as progress:
            return name, summarize(*await client.run(name, load, progress))


def _print(url: str, model: str, s: Summary) -> None:
    out.print(f"{url}, model {model}: {s.completed} answers in {s.seconds:.1f} s", markup=False)
    out.print(
        f"{s.request_throughput:.2f} requests/s; {s.output_throughput:.1f} tokens/s generated, "
        f"{s.total_throughput:.1f} with prompts"
    )
    out.print(f"tokens: {s.prompt_tokens} of prompts, {s.output_tokens} generated\n")
    if s.milliseconds:
        out.print(_table(s.milliseconds))
    for reason, count in s.errors.items():
        out.print(f"[bold red]{count} failed[/]: {escape(reason)}")


def _table(milliseconds: Mapping[str, Mapping[str, float]]) -> Table:
    columns = next(iter(milliseconds.values()))
    table = PlainTable("milliseconds", *columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, values in milliseconds.items():
        times = (f"{values[column]:.1f}" for column in columns)
        table.add_row(f"{name}: {_TIME_LABELS[name]}", *times)
    return table

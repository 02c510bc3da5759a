"""Client that streams completions and records the time of every event."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from opweave.cli.errors import CliError
from opweave.config.checks import api_key_fault
from opweave_engine.cli.load.plan import Load, arrivals, prompts

if TYPE_CHECKING:
    import httpx


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
        CliError: *url*, *timeout* or *api_key* is not valid, or httpx is not installed.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        if not timeout > 0:
            raise CliError(f"--timeout must be positive; it is {timeout}.")
        self._httpx = library = _httpx()
        try:
            base = library.URL(url.rstrip("/").removesuffix("/v1"))
        except library.InvalidURL as error:
            raise CliError(f"{url!r} is not a URL: {error}.") from error
        if base.scheme not in ("http", "https") or not base.host:
            raise CliError(f"{url!r} should be a server's URL, such as http://127.0.0.1:8000.")
        if base.port is not None and not 0 < base.port < 65536:
            raise CliError(f"{url!r} has the port {base.port}; ports are 1 to 65535.")
        if (fault := api_key_fault(api_key or "")) is not None:
            raise CliError(fault)
        self.url = str(base)
        self._client: httpx.AsyncClient = library.AsyncClient(
            base_url=base,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=library.Timeout(timeout, pool=None),
            limits=library.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            found = await self._answer(_body(model, prompt, load), start)
            done += 1
            progress(done, load.requests)
            return found

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(answer(*each))
                for each in zip(arrivals(load), prompts(load), strict=True)
            ]
        return [task.result() for task in tasks], time.perf_counter() - start

    async def _answer(self, body: dict[str, Any], start: float) -> Answer:
        found = Answer(sent=time.perf_counter() - start)
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if not response.is_success:
                    raise _FailedError(_refusal(response.status_code, await response.aread()))
                is_done = False
                async for line in response.aiter_lines():
                    is_done = is_done or _take(found, line, time.perf_counter() - start)
            if not is_done:
                raise _FailedError("the stream ended before [DONE]")
        except (_FailedError, self._httpx.HTTPError) as error:
            found.error = _described(error)
        found.ended = time.perf_counter() - start
        return found


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise CliError(
            f"opweave bench serve needs httpx ({error}). Install it with: "
            "pip install 'opweave-engine[bench]'"
        ) from error
    return httpx


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

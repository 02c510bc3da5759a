"""An engine that answers at once, or as slowly as a test wants, and always the same."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from opweave_engine import (
    Checkpoint,
    CompletionOutput,
    EmbeddingOutput,
    EngineDeadError,
    EngineStats,
    InvalidArgumentError,
    Logprob,
    PoolingParams,
    PromptError,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    Tokenizer,
)
from opweave_engine.client import _Stream
from opweave_engine.detokenizer import Detokenizer
from opweave_engine.metrics import SECONDS, TOKENS, Histogram
from opweave_engine.outputs import FinishReason
from opweave_engine.prompts import Prompt, split_prompt
from opweave_engine.request import OutputAccumulator, merge_deltas
from support import ROOT

CHECKPOINT = ROOT / "examples" / "models" / "tiny-pydoc"
VOCABULARY = 2048
SPECIAL = 3
CONTEXT = 256


@dataclass(frozen=True)
class Call:
    """The request of the server."""

    prompt: Sequence[int]
    params: Any
    request_id: str
    priority: int
    cache_salt: str | None = None


class FakeEngine:
    """Implements ``EngineClient``: seeded tokens, one step after each *delay*.

    Attributes:
        delay: seconds before each token.
        fails_after: the engine breaks after this many tokens of a request.
        raises: what it breaks with; None: it dies.
        calls: what it was asked, in order.
        running: the ids of requests that are not finished.
        most_running: the most there ever were.
        aborted: the ids of requests that were given up.
    """

    def __init__(self, *, delay: float = 0.0, embeds: bool = False) -> None:
        self.tokenizer = Tokenizer(Checkpoint(CHECKPOINT))
        self.max_model_len, self.model_name = CONTEXT, "tiny-pydoc"
        self.vocab_size = VOCABULARY
        self.sampling_defaults: dict[str, object] = {}
        self.delay, self.embeds = delay, embeds
        self.fails_after: int | None = None
        self.raises: Exception | None = None
        self.is_running = True
        self.dead_with: BaseException | None = None
        self.calls: list[Call] = []
        self.running: set[str] = set()
        self.most_running, self.generated = 0, 0
        self.aborted: list[str] = []
        self.finished = {"stop": 0, "length": 0, "abort": 0}
        self._first_token = Histogram(SECONDS)
        self._given_up: set[str] = set()

    async def generate_deltas(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        streams: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        stream, is_finished = _Stream(), False

        async def answer() -> None:
            unread: list[RequestOutput] = []
            try:
                async for delta in self._answer(prompt, params, request_id, priority):
                    unread.append(delta)
                    if streams or delta.finished:
                        stream.put(merge_deltas(unread))
                        unread = []
            except Exception as error:
                if unread:
                    stream.put(merge_deltas(unread))
                stream.fail(error)

        task = asyncio.create_task(answer())
        try:
            while not is_finished:
                delta = await stream.get()
                is_finished = delta.finished
                yield delta
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _answer(
        self, prompt: Prompt, params: SamplingParams, request_id: str, priority: int
    ) -> AsyncGenerator[RequestOutput, None]:
        content, salt = split_prompt(prompt)
        ids = self.tokenizer.encode(content) if isinstance(content, str) else list(content)
        self.calls.append(Call(ids, params, request_id, priority, salt))
        if not ids or not all(0 <= i < VOCABULARY for i in ids):
            raise PromptError("The prompt is empty, or holds a token that the model has not.")
        if not self.is_running:
            raise EngineDeadError("The engine does not run.")
        if request_id in self.running:
            raise InvalidArgumentError(f"request_id={request_id!r} is in use.")
        self.running.add(request_id)
        self.most_running = max(self.most_running, len(self.running))
        reason: str = "abort"
        try:
            async for output in self._steps(ids, params, request_id):
                yield output
            reason = "length"
        finally:
            self.running.discard(request_id)
            self.finished[reason] += 1
            if reason == "abort":
                self.aborted.append(request_id)

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        total = OutputAccumulator()
        deltas = self.generate_deltas(prompt, params, request_id=request_id, priority=priority)
        async with aclosing(deltas):
            async for delta in deltas:
                total.add(delta)
                yield total.output()

    def answers(self, ids: list[int], params: SamplingParams) -> list[Answer]:
        """Return the answers to a prompt."""
        limit = CONTEXT - len(ids) if params.max_tokens is None else params.max_tokens
        return [
            Answer(self.tokenizer, params, index, islice(tokens(ids, params.seed, index), limit))
            for index in range(params.n)
        ]

    async def _steps(
        self, ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        answers = self.answers(ids, params)
        for step in count(1):
            await asyncio.sleep(self.delay)
            if self.fails_after is not None and step > self.fails_after:
                if self.raises is not None:
                    raise self.raises
                self.die(RuntimeError("a rank is gone"))
            if not self.is_running:
                raise EngineDeadError("The engine died.")
            is_aborted = request_id in self._given_up
            growing = [answer for answer in answers if answer.finish_reason is None]
            deltas = [answer.abort() if is_aborted else answer.grow() for answer in growing]
            self.generated += sum(len(delta.token_ids) for delta in deltas)
            finished = all(answer.finish_reason for answer in answers)
            prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
            if step == 1 and (number := params.prompt_logprobs) is not None:
                rest = [logprobs(self.tokenizer, token, number) for token in ids[1:]]
                prompt_logprobs = [None, *rest]
            yield RequestOutput(
                request_id,
                None,
                ids if step == 1 else [],
                deltas,
                finished,
                RequestTimings(0.0, 0.0, 0.0),
                num_cached_tokens=min(2, len(ids)),
                prompt_logprobs=prompt_logprobs,
            )
            if finished:
                return

    async def embed(
        self, prompt: str | Sequence[int], params: PoolingParams | None = None, *, request_id: str
    ) -> EmbeddingOutput:
        if not self.embeds:
            raise InvalidArgumentError("The model does not make embeddings.")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        await asyncio.sleep(self.delay)
        self.calls.append(Call(ids, params, request_id, 0))
        vector = [float(len(ids)), 0.5, -0.25]
        if params is not None and params.normalize:
            vector = [number / math.hypot(*vector) for number in vector]
        return EmbeddingOutput(request_id, ids, vector)

    async def abort(self, request_id: str) -> None:
        self._given_up.add(request_id)

    def die(self, error: BaseException) -> None:
        """Stop answering, as after an error in a step."""
        self.is_running, self.dead_with = False, error

    def stats(self) -> EngineStats:
        counts = {"time_to_first_token": self._first_token.counts()}
        counts["iteration_tokens"] = Histogram(TOKENS).counts()
        return EngineStats(
            running=len(self.running),
            waiting=0,
            kv_usage=0.25,
            prefix_queries=10,
            prefix_hits=4,
            preemptions=1,
            prompt_tokens=sum(len(call.prompt) for call in self.calls),
            generation_tokens=self.generated,
            steps=self.generated,
            finished=self.finished,
            histograms=counts,
        )

    async def drain(self, timeout: float) -> None:
        async def idle() -> None:
            while self.running:
                await asyncio.sleep(0.005)

        try:
            await asyncio.wait_for(idle(), timeout)
        except TimeoutError:
            self._given_up |= self.running

    def shutdown(self) -> None:
        self.is_running = False


class Answer:
    """One growing answer, which ends with its last token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        index: int,
        ids: Iterable[int],
        reason: FinishReason = "length",
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self._tokenizer, self._params, self._index = tokenizer, params, index
        self._detokenizer = Detokenizer.of(tokenizer, (), params)
        self._ids, self._reason = iter(ids), reason
        self._next = next(self._ids, None)

    def grow(self) -> CompletionOutput:
        """Return a delta with the next token."""
        token, self._next = self._next, next(self._ids, None)
        assert token is not None, "the answer has not finished"
        self._detokenizer.push(token)
        is_stop, stop_reason = token in self._params.stop_token_ids, None
        if is_stop or self._next is None:
            self._detokenizer.finish()
            self.finish_reason = "stop" if is_stop else self._reason
            stop_reason = token if is_stop else None
        if self._detokenizer.is_stopped:
            self.finish_reason, stop_reason = "stop", self._detokenizer.stopped_by
        return self._delta([token], stop_reason)

    def abort(self) -> CompletionOutput:
        """Return the last delta."""
        self.finish_reason = "abort"
        return self._delta([])

    def _delta(self, ids: list[int], stop_reason: int | str | None = None) -> CompletionOutput:
        values, number = None, self._params.logprobs
        if number is not None:
            values = [logprobs(self._tokenizer, token, number) for token in ids]
        text = self._detokenizer.take()
        return CompletionOutput(self._index, text, ids, self.finish_reason, values, stop_reason)


def tokens(prompt: Sequence[int], seed: int | None, index: int) -> Iterator[int]:
    """Yield the tokens that answer *prompt*, for ever."""
    draw = random.Random(f"{list(prompt)} {seed} {index}")
    while True:
        yield draw.randrange(SPECIAL, VOCABULARY)


def logprobs(tokenizer: Tokenizer, token: int, count: int) -> Mapping[int, Logprob]:
    """Return made-up log-probabilities: of *token*, which is the second most likely one."""
    likely = [(token * 7 + 11 * rank) % (VOCABULARY - SPECIAL) + SPECIAL for rank in (1, 2, 3, 4)]
    ranked = [each for each in likely if each != token][:1]
    ranked += [token, *(each for each in likely if each != token and each not in ranked)]
    shown = {token: 2} | {each: rank for rank, each in enumerate(ranked[:count], 1)}
    return {
        each: Logprob(-math.log(rank + 1), rank, tokenizer.decode([each]))
        for each, rank in shown.items()
    }

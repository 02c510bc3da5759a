"""One answer to a prompt while it grows: its tokens, its text, and what ends it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from opweave.engine.request.outputs import CompletionOutput, FinishReason, Logprob, RequestTimings
from opweave.engine.request.request import Request
from opweave.engine.sampling.bad_words import BadWords
from opweave.engine.sampling.history import History
from opweave.engine.sampling.sampling_params import SamplingParams
from opweave.engine.sampling.sampling_request import SamplingRequest
from opweave.engine.sampling.token_mask import intersection
from opweave.engine.structured.state import GrammarState
from opweave.engine.tokenization.detokenizer import Detokenizer


class DetokenizedOutput:
    """A sequence of tokens that is generated.

    Args:
        index: its place among the answers to the prompt.
        request: its tokens, for the scheduler.
        params: how to choose tokens.
        seed: of this answer.
        completion: collects the text.
        max_tokens: generate at most this many.
        eos_token_ids: the end-of-text tokens that end it.
        grammar: its position in the grammar that it follows; None: it is free text.
        allowed: the mask of the tokens that may be chosen; None: all.
        bad_words: the words that it may not have.

    Attributes:
        finish_reason: None while it goes on, and if it failed.
        since_last: seconds between the last token and the one before, or the beginning.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        params: SamplingParams,
        seed: int,
        completion: Detokenizer,
        *,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        grammar: GrammarState | None = None,
        allowed: bytes | None = None,
        bad_words: BadWords | None = None,
    ) -> None:
        self.index, self.request, self.completion = index, request, completion
        self.grammar = grammar
        self._allowed, self._bad_words = allowed, bad_words
        self.params, self.seed, self.max_tokens = params, seed, max_tokens
        self.finish_reason: FinishReason | None = None
        self.since_last = 0.0
        self._eos_token_ids, self._stops = eos_token_ids, frozenset(params.stop_token_ids)
        self._forbidden = tuple(sorted(eos_token_ids | self._stops))
        self._history = History.of(request.token_ids, params)
        self._logprobs: list[Mapping[int, Logprob]] | None = None if params.logprobs is None else []
        self._stop_token: int | None = None
        # What workers need only the masks of stays here: it may be long.
        self._sampling = replace(
            params, structured_outputs=None, allowed_token_ids=None, bad_words=()
        )
        self._started = time.perf_counter()
        self._scheduled = self._first_token = self._last_token = self._finished = 0.0

    @property
    def num_tokens(self) -> int:
        """How many tokens were generated."""
        return self.request.num_tokens - self.request.num_prompt_tokens

    @property
    def sampling(self) -> SamplingRequest:
        """How to choose its next token."""
        place = self.num_tokens
        forbidden = self._forbidden if place < self.params.min_tokens else ()
        allowed = self._allowed
        if self.grammar is not None:
            allowed = intersection(allowed, self.grammar.mask.allowed)
            if not self.grammar.leaves_any(forbidden):
                forbidden = ()
        if self._bad_words:
            words = self._bad_words.forbidden(self.request.output_token_ids)
            forbidden = tuple(sorted(words.union(forbidden)))
        return SamplingRequest(self._sampling, self.seed, place, forbidden, self._history, allowed)

    def ends_at(self, token_id: int) -> bool:
        """Whether this token ends it."""
        return token_id in self._eos_token_ids or token_id in self._stops

    def schedule(self) -> None:
        """Take note that it waits no longer, if it did until now."""
        self._scheduled = self._scheduled or self._elapsed()

    def append(self, token_id: int, logprobs: Mapping[int, Logprob]) -> None:
        """Add a generated token, and finish if it is the last."""
        self.request.token_ids.append(token_id)
        if self._history is not None:
            self._history.counts[token_id] += 1
        if self._logprobs is not None:
            self._logprobs.append(logprobs)
        now = self._elapsed()
        self.since_last, self._last_token = now - self._last_token, now
        self._first_token = self._first_token or now
        self._end_or_go_on(token_id)

    def _end_or_go_on(self, token_id: int) -> None:
        if self.ends_at(token_id):
            if token_id not in self._eos_token_ids:
                self._stop_token = token_id
            if self.params.include_stop_str_in_output:
                self.completion.push(token_id)
            self.finish("stop")
            return
        self.completion.push(token_id)
        if self.completion.is_stopped or (self.grammar is not None and self.grammar.is_complete):
            self.finish("stop")
        elif self.num_tokens >= self.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason | None) -> None:
        """End it, unless it has ended; None: it failed."""
        if self._finished:
            return
        self.completion.finish()
        # The rest of the text may hold a stop string of its own.
        self.finish_reason = "stop" if reason and self.completion.is_stopped else reason
        self._finished = self._elapsed()

    def output(self) -> CompletionOutput:
        """Return what there is so far."""
        stopped_by = self.completion.stopped_by
        return CompletionOutput(
            self.index,
            self.completion.text,
            self.request.output_token_ids,
            self.finish_reason,
            None if self._logprobs is None else list(self._logprobs),
            self._stop_token if stopped_by is None else stopped_by,
        )

    @property
    def is_finished(self) -> bool:
        """Whether it ended, well or not."""
        return self._finished > 0

    def timings(self) -> RequestTimings:
        """Return when what happened."""
        return RequestTimings(self._scheduled, self._first_token, self._finished)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

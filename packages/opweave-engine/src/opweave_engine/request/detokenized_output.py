"""One output of a request while it grows: its tokens, its text, and why it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from opweave_engine.request.outputs import CompletionOutput, FinishReason, Logprob, RequestTimings
from opweave_engine.request.request import Request
from opweave_engine.sampling.bad_words import BadWords
from opweave_engine.sampling.history import History
from opweave_engine.sampling.sampling_params import SamplingParams
from opweave_engine.sampling.sampling_request import SamplingRequest
from opweave_engine.sampling.token_mask import intersection
from opweave_engine.structured.state import GrammarState
from opweave_engine.tokenization.detokenizer import Detokenizer


class DetokenizedOutput:
    """A sequence that is being generated.

    Args:
        index: its index among the outputs of the request.
        request: its tokens, for the scheduler.
        params: the sampling parameters.
        seed: the seed of this output.
        detokenizer: collects the text.
        max_tokens: the maximum number of tokens to generate.
        eos_token_ids: end-of-text tokens that end it.
        grammar: the state of its grammar; None: it is unconstrained.
        allowed: bit mask of the token ids that may be sampled; None: all.
        bad_words: words that must not be generated.

    Attributes:
        finish_reason: None until it ends, and if it failed.
        since_last: seconds between the last two tokens; for the first token, since the request
            arrived.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        params: SamplingParams,
        seed: int,
        detokenizer: Detokenizer,
        *,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        grammar: GrammarState | None = None,
        allowed: bytes | None = None,
        bad_words: BadWords | None = None,
    ) -> None:
        self.index, self.request, self._detokenizer = index, request, detokenizer
        self.grammar = grammar
        self._allowed, self._bad_words = allowed, bad_words
        self.params, self.seed, self.max_tokens = params, seed, max_tokens
        self.finish_reason: FinishReason | None = None
        self._num_sent, self._has_sent_end = 0, False
        self.since_last = 0.0
        self._eos_token_ids, self._stops = eos_token_ids, frozenset(params.stop_token_ids)
        self._forbidden = tuple(sorted(eos_token_ids | self._stops))
        self._history = History.of(request.token_ids, params)
        self._logprobs: list[Mapping[int, Logprob]] | None = None if params.logprobs is None else []
        self._stop_token: int | None = None
        # Workers need only the masks made of these, which may be long.
        self._sampling = replace(
            params, structured_outputs=None, allowed_token_ids=None, bad_words=()
        )
        self._started = time.perf_counter()
        self._scheduled = self._first_token = self._last_token = self._finished = 0.0

    @property
    def num_tokens(self) -> int:
        """The number of generated tokens."""
        return self.request.num_tokens - self.request.num_prompt_tokens

    @property
    def sampling(self) -> SamplingRequest:
        """How to sample the next token."""
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
        """Whether this token ends the output."""
        return token_id in self._eos_token_ids or token_id in self._stops

    def schedule(self) -> None:
        """Record the time at which it was first scheduled."""
        self._scheduled = self._scheduled or self._elapsed()

    def append(self, token_id: int, logprobs: Mapping[int, Logprob]) -> None:
        """Add a generated token, and finish if it is the last one."""
        self.request.token_ids.append(token_id)
        if self._history is not None:
            self._history.counts[token_id] += 1
        if self._logprobs is not None:
            self._logprobs.append(logprobs)
        now = self._elapsed()
        self.since_last, self._last_token = now - self._last_token, now
        self._first_token = self._first_token or now
        self._finish_if_last(token_id)

    def _finish_if_last(self, token_id: int) -> None:
        if self.ends_at(token_id):
            if token_id not in self._eos_token_ids:
                self._stop_token = token_id
            if self.params.include_stop_str_in_output:
                self._detokenizer.push(token_id)
            self.finish("stop")
            return
        self._detokenizer.push(token_id)
        if self._detokenizer.is_stopped or (self.grammar is not None and self.grammar.is_complete):
            self.finish("stop")
        elif self.num_tokens >= self.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason | None) -> None:
        """End the output, unless it has ended. None: it failed."""
        if self._finished:
            return
        if reason is not None:  # the detokenizer may be the part that failed
            self._detokenizer.finish()
        # The text that was held back may contain a stop string.
        self.finish_reason = "stop" if reason and self._detokenizer.is_stopped else reason
        self._finished = self._elapsed()

    def output(self) -> CompletionOutput:
        """Return everything so far."""
        return CompletionOutput(
            self.index,
            self._detokenizer.text,
            self.request.output_token_ids,
            self.finish_reason,
            None if self._logprobs is None else list(self._logprobs),
            self._stop_reason,
        )

    @property
    def has_changed(self) -> bool:
        """Whether the next delta holds anything."""
        is_new_end = self.is_finished and not self._has_sent_end
        return self._num_sent < self.num_tokens or is_new_end

    def delta(self) -> CompletionOutput:
        """Return what is new since the last call; the finish reason is reported once."""
        start, self._num_sent = self._num_sent, self.num_tokens
        ends, self._has_sent_end = self.is_finished and not self._has_sent_end, self.is_finished
        return CompletionOutput(
            self.index,
            self._detokenizer.take(),
            self.request.token_ids[self.request.num_prompt_tokens + start :],
            self.finish_reason if ends else None,
            None if self._logprobs is None else self._logprobs[start:],
            self._stop_reason if ends else None,
        )

    @property
    def _stop_reason(self) -> str | int | None:
        stopped_by = self._detokenizer.stopped_by
        return self._stop_token if stopped_by is None else stopped_by

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for any reason."""
        return self._finished > 0

    def timings(self) -> RequestTimings:
        """Return when it was scheduled, got its first token, and ended."""
        return RequestTimings(self._scheduled, self._first_token, self._finished)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

"""A request from its prompt to its outputs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

from opweave.platforms import Platform
from opweave_engine.detokenizer import Detokenizer
from opweave_engine.errors import EngineError, InvalidArgumentError
from opweave_engine.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    RequestTimings,
)
from opweave_engine.prompts import Prompt, PromptReader, split_prompt
from opweave_engine.sampling.history import BadWords, History, intersection, token_mask
from opweave_engine.sampling.params import RequestSeeds, SamplingParams, check_params
from opweave_engine.sampling.sampler import SamplingRequest, derived_seed
from opweave_engine.structured.grammar_compiler import GrammarCompiler, GrammarState

# One sequence, as seen by the scheduler and the cache.


_arrivals = count()


class Request:
    """The tokens of one output, including the prompt, and how many of them are computed.

    Args:
        request_id: a unique name.
        prompt_token_ids: at least one token.
        priority: the scheduling priority; with the priority policy, lower numbers go first.
        cache_salt: shares cached prefixes only with requests of the same salt.

    Attributes:
        token_ids: the prompt's tokens, followed by the generated ones.
        num_computed_tokens: the number of leading tokens in the KV cache.
        num_cached_tokens: the number of prompt tokens found in the prefix cache when it was first
            scheduled; None before that.
        num_preemptions: how often it was preempted.
        uses_prefix: whether it may start from a cached prefix.
        arrival: a number that increases from request to request.
        block_hashes: hashes of its leading full blocks, for the prefix cache.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        self.request_id, self.priority, self.arrival = request_id, priority, next(_arrivals)
        self.token_ids, self.cache_salt = list(prompt_token_ids), cache_salt
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.uses_prefix = True
        self.block_hashes: list[bytes] = []

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r}: {self.num_computed_tokens} of {self.num_tokens}>"

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far, including the prompt."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of tokens that are not in the KV cache; at least one between steps."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_computed(self) -> bool:
        """Whether all tokens are in the KV cache, so that the next one can be added."""
        return len(self.token_ids) == self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]


# One output of a request while it grows: its tokens, its text, and why it ends.


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
        self._allowed, self._bad_words = allowed, bad_words or None
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
        return len(self.request.token_ids) - self.request.num_prompt_tokens

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
        if self._bad_words is not None:
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
        return self._completion(self._detokenizer.text, 0, shows_end=True)

    @property
    def has_changed(self) -> bool:
        """Whether the next delta holds anything."""
        is_new_end = self.is_finished and not self._has_sent_end
        return self._num_sent < self.num_tokens or is_new_end

    def delta(self) -> CompletionOutput:
        """Return what is new since the last call; the finish reason is reported once."""
        start, self._num_sent = self._num_sent, self.num_tokens
        ends, self._has_sent_end = self.is_finished and not self._has_sent_end, self.is_finished
        return self._completion(self._detokenizer.take(), start, shows_end=ends)

    def _completion(self, text: str, start: int, *, shows_end: bool) -> CompletionOutput:
        """Return *text* and the generated tokens from *start* on."""
        stopped_by = self._detokenizer.stopped_by
        stop_reason = self._stop_token if stopped_by is None else stopped_by
        return CompletionOutput(
            self.index,
            text,
            self.request.token_ids[self.request.num_prompt_tokens + start :],
            self.finish_reason if shows_end else None,
            None if self._logprobs is None else self._logprobs[start:],
            stop_reason if shows_end else None,
        )

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for any reason."""
        return self._finished > 0

    def timings(self) -> RequestTimings:
        """Return when it was scheduled, got its first token, and ended."""
        return RequestTimings(self._scheduled, self._first_token, self._finished)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started


# Adds up the deltas of a request.


class OutputAccumulator:
    """Accumulates the deltas of one request."""

    def __init__(self) -> None:
        self._newest: RequestOutput | None = None  # with the prompt of the first delta
        self._outputs: dict[int, CompletionOutput] = {}

    def add(self, delta: RequestOutput) -> None:
        """Append a delta."""
        first = self._newest or delta
        self._newest = replace(
            delta,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs,
        )
        for output in delta.outputs:
            empty = CompletionOutput(output.index, "", [], None)
            total = self._outputs.setdefault(output.index, empty)
            total.text += output.text
            total.token_ids += output.token_ids
            if output.logprobs is not None:
                total.logprobs = total.logprobs or []
                total.logprobs += output.logprobs
            if output.finish_reason is not None:
                total.finish_reason, total.stop_reason = output.finish_reason, output.stop_reason

    def output(self) -> RequestOutput:
        """Return everything that was added, as one output. At least one delta must be added."""
        assert self._newest is not None, "add() comes first"
        outputs = [
            replace(out, token_ids=[*out.token_ids], logprobs=out.logprobs and [*out.logprobs])
            for _, out in sorted(self._outputs.items())
        ]
        return replace(self._newest, outputs=outputs)


def merge_deltas(deltas: Sequence[RequestOutput]) -> RequestOutput:
    """Return consecutive deltas of a request, at least one, as one delta."""
    if len(deltas) == 1:
        return deltas[0]
    merged = OutputAccumulator()
    for delta in deltas:
        merged.add(delta)
    return merged.output()


# A running request: its prompt, and one or several outputs.


class ActiveRequest:
    """The state of a request that the scheduler does not need.

    The first output computes the prompt. The others start once that is done, and find the prompt in
    the prefix cache.

    Args:
        request_id: the client's name for it.
        prompt: the prompt's text, if it was given as text.
        outputs: at least one.
        streams: whether the client wants an output after every token, or only at the end.
        deltas: whether each output holds only what is new, or everything so far.

    Attributes:
        error: why the request failed, or None.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        outputs: Sequence[DetokenizedOutput],
        *,
        streams: bool = True,
        deltas: bool = False,
    ) -> None:
        self.request_id, self.prompt = request_id, prompt
        self.outputs, self.streams = list(outputs), streams
        self.error: EngineError | None = None
        self.max_tokens = sum(output.max_tokens for output in outputs)
        self._deltas, self._has_sent = deltas, False
        request = outputs[0].request
        self._prompt_token_ids = request.token_ids[: request.num_prompt_tokens]
        self._prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
        self._num_scored = request.num_prompt_tokens
        if outputs[0].params.prompt_logprobs is not None:
            self._prompt_logprobs, self._num_scored = [None], 1

    @property
    def is_finished(self) -> bool:
        """Whether all outputs have ended, for any reason."""
        return all(output.is_finished for output in self.outputs)

    @property
    def grammar_failure(self) -> EngineError | None:
        """Why an unfinished output cannot follow its grammar any further, or None."""
        if self.outputs[0].grammar is None:  # then no output has one
            return None
        grammars = [output.grammar for output in self.outputs if not output.is_finished]
        return next((g.error for g in grammars if g is not None and g.error is not None), None)

    @property
    def num_done(self) -> int:
        """The number of ``max_tokens`` that are generated or no longer needed."""
        return sum(o.max_tokens if o.is_finished else o.num_tokens for o in self.outputs)

    def prompt_targets(self, output: DetokenizedOutput, start: int, count: int) -> list[int]:
        """Return the prompt tokens whose log-probabilities a step must compute.

        They follow the *count* tokens from *start* that the step computes for *output*.
        """
        if output is not self.outputs[0] or self._num_scored == len(self._prompt_token_ids):
            return []
        return self._prompt_token_ids[start + 1 : start + count + 1]

    def score_prompt(self, start: int, logprobs: Sequence[Mapping[int, Logprob]]) -> None:
        """Store the log-probabilities of the tokens after *start*, which may be stored already."""
        if self._prompt_logprobs is not None and logprobs:
            self._prompt_logprobs[start + 1 :] = logprobs
            self._num_scored = len(self._prompt_logprobs)

    def abort(self) -> None:
        """Abort all outputs that have not ended."""
        for output in self.outputs:
            output.finish("abort")

    def fail(self, error: EngineError) -> None:
        """End the request with an error."""
        self.error = error
        for output in self.outputs:
            output.finish(None)

    def next_output(self) -> RequestOutput:
        """Return the next output for the client: everything so far, or the delta.

        The first delta holds the prompt and all outputs, later ones only outputs that changed.
        """
        if not self._deltas:
            return self.output()
        is_first, self._has_sent = not self._has_sent, True
        changed = [output.delta() for output in self.outputs if is_first or output.has_changed]
        return self._output(changed, shows_prompt=is_first)

    def output(self) -> RequestOutput:
        """Return everything so far."""
        return self._output([output.output() for output in self.outputs], shows_prompt=True)

    def _output(self, outputs: list[CompletionOutput], *, shows_prompt: bool) -> RequestOutput:
        logprobs = self._prompt_logprobs if shows_prompt else None
        is_finished, timings = self.is_finished, self.outputs[0].timings()
        if len(self.outputs) > 1:
            last = max(output.timings().finished for output in self.outputs)
            timings = replace(timings, finished=last if is_finished else 0.0)
        return RequestOutput(
            self.request_id,
            self.prompt if shows_prompt else None,
            self._prompt_token_ids if shows_prompt else [],
            outputs,
            is_finished,
            timings,
            self.outputs[0].request.num_cached_tokens or 0,
            None if logprobs is None else list(logprobs),
            self.error,
        )


# Builds requests from prompts and sampling parameters.


class RequestFactory:
    """Turns prompts and sampling parameters into requests that the engine can run.

    Args:
        prompts: tokenizes prompts and checks their length.
        grammars: compiles the grammars of structured outputs.
        platform: may reject a request.
        eos_token_ids: the model's end-of-text tokens.
        seed: of the engine; requests without a seed derive theirs from it.
    """

    def __init__(
        self,
        prompts: PromptReader,
        grammars: GrammarCompiler,
        platform: Platform,
        eos_token_ids: frozenset[int],
        seed: int,
    ) -> None:
        self.seeds = RequestSeeds(seed)
        self._prompts, self._grammars, self._platform = prompts, grammars, platform
        self._eos_token_ids, self._numbers = eos_token_ids, count()

    def make(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        streams: bool = True,
        deltas: bool = False,
        add_special_tokens: bool = True,
    ) -> ActiveRequest:
        """Return a request for :meth:`EngineCore.add_request`.

        Args:
            request_id: a name that is unique among unfinished requests.
            prompt: a text, token ids, or a dict with one of them and a ``cache_salt``.
            params: the sampling parameters.
            priority: the scheduling priority, an integer; with the priority policy, lower ones are
                scheduled first.
            streams: return an output after every token instead of only at the end.
            deltas: outputs contain only new text and tokens; only the first contains the prompt.
            add_special_tokens: add the tokenizer's special tokens to a text.

        Raises:
            PromptError: the prompt is empty, too long, or has token ids outside the vocabulary.
            SamplingParamsError: *params* are not SamplingParams, name token ids outside the
                vocabulary, or contain a grammar that cannot be compiled.
            InvalidArgumentError: *priority* is not an integer.
            OpweaveError: the platform rejects the request.
        """
        check_params(params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidArgumentError(
                f"priority={priority!r} must be an integer; a lower number goes first."
            )
        content, salt = split_prompt(prompt)
        tokenizer, size = self._prompts.tokenizer, self._prompts.vocab_size
        keep = params.prompt_limit(self._prompts.max_positions)
        tokens = self._prompts.tokens(content, add_special_tokens=add_special_tokens, keep=keep)
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        bad_words, allowed = BadWords(params.bad_words, tokenizer), params.allowed_token_ids
        params.check_vocabulary(size, eos, bad_words.single)
        mask = None if allowed is None else token_mask(allowed, size)
        self._platform.validate_request(params)
        room = self._prompts.max_positions - len(tokens)
        seed = self.seeds.of(params)
        outputs = []
        for index in range(params.n):
            # Unique even if request ids contain "#".
            name = f"{request_id}#{next(self._numbers)}"
            output = DetokenizedOutput(
                index,
                Request(name, tokens, priority=priority, cache_salt=salt),
                params,
                derived_seed(seed, index),
                Detokenizer.of(tokenizer, tokens, params),
                max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
                eos_token_ids=eos,
                grammar=self._grammars.start(params),
                allowed=mask,
                bad_words=bad_words,
            )
            outputs.append(output)
        # The prefix cache stores no logits, so prompt logprobs need the whole prompt computed.
        outputs[0].request.uses_prefix = params.prompt_logprobs is None
        text = content if isinstance(content, str) else None
        return ActiveRequest(request_id, text, outputs, streams=streams, deltas=deltas)

"""A running request: its prompt, and one or several outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opweave_engine.errors import EngineError
from opweave_engine.request.detokenized_output import DetokenizedOutput
from opweave_engine.request.outputs import Logprob, RequestOutput, RequestTimings


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
        first = outputs[0]
        request = first.request
        self._prompt_token_ids = request.token_ids[: request.num_prompt_tokens]
        self._prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
        self._num_known = request.num_prompt_tokens
        if first.params.prompt_logprobs is not None:
            self._prompt_logprobs, self._num_known = [None], 1

    @property
    def is_finished(self) -> bool:
        """Whether all outputs have ended, for any reason."""
        return all(output.is_finished for output in self.outputs)

    @property
    def grammar_failure(self) -> EngineError | None:
        """Why an unfinished output cannot follow its grammar any further, or None."""
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
        if output is not self.outputs[0] or self._num_known == len(self._prompt_token_ids):
            return []
        return self._prompt_token_ids[start + 1 : start + count + 1]

    def score_prompt(self, start: int, logprobs: Sequence[Mapping[int, Logprob]]) -> None:
        """Store the log-probabilities of the tokens after *start*, which may be stored already."""
        if self._prompt_logprobs is not None and logprobs:
            self._prompt_logprobs[start + 1 :] = logprobs
            self._num_known = len(self._prompt_logprobs)

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
        return RequestOutput(
            self.request_id,
            self.prompt if is_first else None,
            self._prompt_token_ids if is_first else [],
            [output.delta() for output in self.outputs if is_first or output.has_changed],
            self.is_finished,
            self._timings(),
            self._num_cached_tokens,
            self._known_prompt_logprobs() if is_first else None,
            self.error,
        )

    def output(self) -> RequestOutput:
        """Return everything so far."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            self._prompt_token_ids,
            [output.output() for output in self.outputs],
            self.is_finished,
            self._timings(),
            self._num_cached_tokens,
            self._known_prompt_logprobs(),
            self.error,
        )

    @property
    def _num_cached_tokens(self) -> int:
        return self.outputs[0].request.num_cached_tokens or 0

    def _known_prompt_logprobs(self) -> list[Mapping[int, Logprob] | None] | None:
        return None if self._prompt_logprobs is None else list(self._prompt_logprobs)

    def _timings(self) -> RequestTimings:
        first, *_ = timings = [output.timings() for output in self.outputs]
        finished = max(each.finished for each in timings) if self.is_finished else 0.0
        return RequestTimings(first.scheduled, first.first_token, finished)

"""A request while it is answered: its prompt, and one answer or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opweave.engine.errors import EngineError
from opweave.engine.request.detokenized_output import DetokenizedOutput
from opweave.engine.request.outputs import Logprob, RequestOutput, RequestTimings


class ActiveRequest:
    """A request with all that the scheduler need not know.

    Its first answer computes the prompt. The others begin when that is done, and find the prompt in
    the prefix cache.

    Args:
        request_id: its name.
        prompt: its text, if it was given as text.
        answers: at least one.
        streams: whether an output is wanted after every token, or only at the end.

    Attributes:
        error: why it failed, or None.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        answers: Sequence[DetokenizedOutput],
        *,
        streams: bool = True,
    ) -> None:
        self.request_id, self.prompt = request_id, prompt
        self.answers, self.streams = list(answers), streams
        self.error: EngineError | None = None
        self.max_tokens = sum(answer.max_tokens for answer in answers)
        first = answers[0]
        request = first.request
        self._prompt_token_ids = request.token_ids[: request.num_prompt_tokens]
        self._prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
        self._num_known = request.num_prompt_tokens
        if first.params.prompt_logprobs is not None:
            self._prompt_logprobs, self._num_known = [None], 1

    @property
    def is_finished(self) -> bool:
        """Whether it ended, well or not."""
        return all(answer.is_finished for answer in self.answers)

    @property
    def grammar_failure(self) -> EngineError | None:
        """Why an unfinished answer cannot follow its grammar any further, or None."""
        grammars = [answer.grammar for answer in self.answers if not answer.is_finished]
        return next((g.error for g in grammars if g is not None and g.error is not None), None)

    @property
    def num_done(self) -> int:
        """How many of ``max_tokens`` are generated, or not needed any more."""
        return sum(a.max_tokens if a.is_finished else a.num_tokens for a in self.answers)

    def prompt_targets(self, answer: DetokenizedOutput, start: int, count: int) -> list[int]:
        """Return the tokens of the prompt whose log-probabilities a step must compute.

        They follow the *count* tokens from *start* that it computes of *answer*.
        """
        if answer is not self.answers[0] or self._num_known == len(self._prompt_token_ids):
            return []
        return self._prompt_token_ids[start + 1 : start + count + 1]

    def score_prompt(self, start: int, logprobs: Sequence[Mapping[int, Logprob]]) -> None:
        """Take the log-probabilities of the tokens after *start*; known ones may come again."""
        if self._prompt_logprobs is not None and logprobs:
            self._prompt_logprobs[start + 1 :] = logprobs
            self._num_known = len(self._prompt_logprobs)

    def abort(self) -> None:
        """Give up all answers that are not finished."""
        for answer in self.answers:
            answer.finish("abort")

    def fail(self, error: EngineError) -> None:
        """End it without an answer."""
        self.error = error
        for answer in self.answers:
            answer.finish(None)

    def output(self) -> RequestOutput:
        """Return what there is so far."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            self._prompt_token_ids,
            [answer.output() for answer in self.answers],
            self.is_finished,
            self._timings(),
            self.answers[0].request.num_cached_tokens or 0,
            None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            self.error,
        )

    def _timings(self) -> RequestTimings:
        first, *_ = timings = [answer.timings() for answer in self.answers]
        finished = max(each.finished for each in timings) if self.is_finished else 0.0
        return RequestTimings(first.scheduled, first.first_token, finished)

"""One request while it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens

from opweave.engine.completion import Completion
from opweave.engine.kv_cache import SequenceCache
from opweave.engine.outputs import CompletionOutput, FinishReason, RequestOutput, RequestTimings
from opweave.engine.sampler import SamplingRequest


class Sequence:
    """The tokens of one request: the prompt, and those generated so far.

    Args:
        prompt: its text, if it was given as text.
        prompt_token_ids: at least one token.
        sampling: how to choose tokens.
        completion: collects the text.
        max_tokens: generate at most this many.
        eos_token_ids: the tokens that end it.
    """

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: Tokens[int],
        sampling: SamplingRequest,
        completion: Completion,
        *,
        max_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.prompt, self.sampling, self.completion = prompt, sampling, completion
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_tokens, self.eos_token_ids = max_tokens, eos_token_ids
        self.cache: SequenceCache | None = None  # while it runs
        self.finish_reason: FinishReason | None = None
        self._started = time.perf_counter()
        self._first_token = self._finished = 0.0

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_done(self) -> int:
        """How many of ``max_tokens`` are generated, or not needed any more."""
        if self.finish_reason is not None:
            return self.max_tokens
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def uncomputed(self) -> list[int]:
        """The tokens whose keys and values are not in the cache yet."""
        return self.token_ids[self.cache.num_tokens if self.cache else 0 :]

    def append(self, token_id: int) -> None:
        """Add a generated token, and finish if it is the last."""
        self.token_ids.append(token_id)
        self.completion.push(token_id)
        num_outputs = self.num_done
        if num_outputs == 1:
            self._first_token = time.perf_counter() - self._started
        if self.completion.is_stopped or token_id in self.eos_token_ids:
            self._finish("stop")
        elif num_outputs >= self.max_tokens:
            self._finish("length")

    def output(self) -> RequestOutput:
        """Return the result of a finished sequence."""
        assert self.finish_reason is not None, f"running: {self.token_ids=}"
        answer = CompletionOutput(
            0, self.completion.text, self.output_token_ids, self.finish_reason
        )
        prompt_token_ids = self.token_ids[: self.num_prompt_tokens]
        timings = RequestTimings(self._first_token, self._finished)
        return RequestOutput(self.prompt, prompt_token_ids, [answer], timings)

    def _finish(self, reason: FinishReason) -> None:
        self.completion.finish()
        # The rest of the text may hold a stop string of its own.
        self.finish_reason = "stop" if self.completion.is_stopped else reason
        self._finished = time.perf_counter() - self._started
        self.cache = None

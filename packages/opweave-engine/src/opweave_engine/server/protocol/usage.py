"""Token usage of a request."""

from __future__ import annotations

from opweave_engine import RequestOutput
from opweave_engine.server.protocol.base import ResponseBody


class PromptTokensDetails(ResponseBody):
    """Where the prompt tokens came from."""

    cached_tokens: int


class Usage(ResponseBody):
    """The number of prompt tokens and of generated tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        """Return the usage for numbers of prompt, generated and cached prompt tokens."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


class UsageCounter:
    """Counts the tokens of a request, from deltas or from complete outputs.

    Args:
        counts_completion: whether generated tokens are counted.
    """

    def __init__(self, *, counts_completion: bool = True) -> None:
        self._counts_completion = counts_completion
        self._prompt = self._completion = 0
        self._cached: dict[int, int] = {}

    def add(self, output: RequestOutput, number: int = 0) -> None:
        """Count the tokens of an output or a delta for prompt *number*."""
        self._prompt += len(output.prompt_token_ids)
        self._completion += sum(len(each.token_ids) for each in output.outputs)
        self._cached[number] = output.num_cached_tokens or self._cached.get(number, 0)

    def usage(self) -> Usage:
        """Return the usage so far."""
        completion = self._completion * self._counts_completion
        return Usage.of(self._prompt, completion, sum(self._cached.values()))

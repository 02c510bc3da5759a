"""How many tokens a request took."""

from __future__ import annotations

from collections.abc import Iterable

from opweave.engine import RequestOutput
from opweave.server.protocol.base import ResponseBody


class PromptTokensDetails(ResponseBody):
    """Where the tokens of the prompts came from."""

    cached_tokens: int


class Usage(ResponseBody):
    """Tokens of the prompts and of the answers."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput], *, counts_answers: bool = True) -> Usage:
        """Count the tokens of what was answered."""
        answered = list(outputs)
        prompt = sum(len(output.prompt_token_ids) for output in answered)
        completion = sum(len(a.token_ids) for output in answered for a in output.outputs)
        completion *= counts_answers
        cached = sum(output.num_cached_tokens for output in answered)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

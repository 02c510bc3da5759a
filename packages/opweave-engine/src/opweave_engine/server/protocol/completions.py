"""``/v1/completions``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from opweave_engine import FinishReason, SamplingParams, SamplingParamsError
from opweave_engine.server.errors import unsupported
from opweave_engine.server.protocol import base
from opweave_engine.server.protocol.sampling import SamplingFields

_DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API


class CompletionRequest(SamplingFields):
    """Continue one or more prompts."""

    prompt: base.Input = Field(description="A text or token ids, or a list of them.")
    prompt_embeds: base.Unused = base.refused("Send a text or token ids.", [])
    echo: bool | None = base.supported("Begin the answer with the prompt.")
    logprobs: base.Int | None = base.supported(
        "Log-probabilities of the tokens and this many others."
    )
    suffix: base.Unused = base.refused("Models continue prompts only.", "")
    best_of: base.Int | None = base.supported("Only with the value of n.")

    @property
    def writes_nothing(self) -> bool:
        """Whether the request only scores the prompt, without generating."""
        return self.max_tokens == 0

    def params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """Return the parameters; *defaults* are the checkpoint's.

        Raises:
            SamplingParamsError: a value is out of range.
            ApiError: the request asks for something that is not supported.
        """
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", f"best_of={self.best_of}", "It must equal n; use n.")
        if self.max_tokens is not None and self.max_tokens < 0:
            message = f"max_tokens={self.max_tokens} must be an integer of at least 0."
            raise SamplingParamsError(message, "max_tokens")
        limit = self.max_tokens
        if limit is None:
            limit = defaults.get("max_tokens", _DEFAULT_MAX_TOKENS)
        counts = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return self.sampling_params(
            1 if self.writes_nothing else limit,
            defaults,
            logprobs=self.logprobs,
            prompt_logprobs=max((n for n in counts if n is not None), default=None),
        )


class CompletionLogprobs(base.ResponseBody):
    """Log-probabilities, in lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(base.ResponseBody):
    """One answer, or a delta of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: base.PromptLogprobs | None = None
    error: base.ErrorDetail | None = None


class CompletionResponse(base.GeneratedBody):
    """All answers or, in a stream, a delta of one answer."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: base.Usage | None = None

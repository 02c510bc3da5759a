"""Sampling parameters in requests."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from opweave_engine import SamplingParams, SamplingParamsError
from opweave_engine.server.errors import ApiError
from opweave_engine.server.protocol.base import (
    Int,
    Items,
    RequestFields,
    StopsAtFault,
    Text,
    TokenIds,
)
from opweave_engine.server.protocol.structured import FormFields

_MAX_STOPS = 64
_MAX_WORDS, _LONGEST = 256, 256  # words and their characters: they are tokenized at once
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "min_tokens", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "allowed_token_ids", "bad_words", "truncate_prompt_tokens",
)  # fmt: skip
_HOTTEST = 2.0  # as in OpenAI's API; SamplingParams has no limit


Priority = Annotated[Int, Field(ge=-(2**31), lt=2**31)]
CacheSalt = Annotated[Text, Field(min_length=1)]


def _token(key: object) -> object:
    """Convert a JSON key to a token id; ``int`` accepts more than decimal numbers."""
    if isinstance(key, str) and not re.fullmatch(r"-?[0-9]+", key):
        raise ValueError(f"{key!a} is not an integer")
    return key


TokenKey = Annotated[int, BeforeValidator(_token), Field(strict=False)]


class StreamOptions(RequestFields):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(FormFields):
    """The fields of :class:`opweave_engine.SamplingParams`; None means its default."""

    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    stop: Text | Annotated[Items[Text], Field(max_length=_MAX_STOPS)] | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[TokenKey, float], StopsAtFault] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: (
        Annotated[Items[Annotated[Text, Field(max_length=_LONGEST)]], Field(max_length=_MAX_WORDS)]
        | None
    ) = None
    truncate_prompt_tokens: Int | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: Text | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        """Whether every event of a stream has the token usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_params(
        self, max_tokens: int | None, defaults: Mapping[str, Any], **others: Any
    ) -> SamplingParams:
        """Return the parameters.

        Args:
            max_tokens: the maximum number of tokens of an answer.
            defaults: the checkpoint's values for missing fields.
            others: parameters with other names in the endpoint.

        Raises:
            SamplingParamsError: a value is out of range.
            ApiError: fields for streams or for structured output contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                "stream_options are for streams only; they need stream=true.",
                param="stream_options",
            )
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(
                "prompt_logprobs are not sent in streams; leave out stream=true.",
                param="prompt_logprobs",
            )
        if self.temperature is not None and _HOTTEST < self.temperature < math.inf:
            message = f"temperature={self.temperature:g} must be at most {_HOTTEST:g}."
            raise SamplingParamsError(message, "temperature")
        values = {**{name: getattr(self, name) for name in _SAME}, **others}
        values["structured_outputs"] = self.form()
        given = {name: value for name, value in values.items() if value is not None}
        return SamplingParams(**{**defaults, "max_tokens": max_tokens, **given})

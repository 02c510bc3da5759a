"""``/v1/chat/completions``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from opweave.engine import FinishReason, SamplingParams, SamplingParamsError
from opweave.server.errors import ApiError
from opweave.server.protocol.base import Fields, RequestBody, ResponseBody, Text
from opweave.server.protocol.sampling import SamplingFields
from opweave.server.protocol.usage import Usage

_RESERVED = {"messages", "tools", "add_generation_prompt"}


class ContentPart(Fields):
    """A part of a message; text is the only kind."""

    type: Text
    text: Text | None = None

    @model_validator(mode="after")
    def _has_text(self) -> ContentPart:
        if self.text is None:
            raise ValueError(f"a part of type {self.type!r} needs 'text'")
        return self

    @field_validator("type")
    @classmethod
    def _only_text(cls, kind: str) -> str:
        if kind not in ("text", "input_text"):
            raise ValueError(f"{kind!r} is not supported; the model takes parts of type 'text'")
        return kind


class ChatMessage(Fields):
    """A message; fields that are unknown here are the chat template's business."""

    role: Annotated[Text, Field(min_length=1)]
    content: Text | list[ContentPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return it as templates expect it: content in one piece, arguments of calls as objects."""
        message: dict[str, Any] = {"role": self.role, **(self.model_extra or {})}
        if isinstance(self.content, list):
            message["content"] = "\n".join(part.text or "" for part in self.content)
        else:
            message["content"] = self.content
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [_with_arguments(call) for call in calls]
        return message


class Conversation(RequestBody):
    """What becomes a prompt by the chat template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_clash(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        if clash := sorted(_RESERVED & (variables or {}).keys()):
            raise ValueError(f"cannot hold {', '.join(clash)}, which the request itself has")
        return variables


class ChatRequest(SamplingFields, Conversation):
    """Answer a conversation."""

    endpoint = "chat"

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """Return the parameters; *defaults* are the checkpoint's.

        Raises:
            SamplingParamsError: a value is out of range.
            ApiError: the request contradicts itself.
        """
        names = {"logprobs": "top_logprobs", "max_tokens": self.limit_field}
        try:
            return self._params(defaults)
        except SamplingParamsError as error:
            raise _renamed(error, names) from error

    @property
    def limit_field(self) -> str:
        """The field that says how long the answer may be."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def _params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs=true.", param="top_logprobs")
        count = (self.top_logprobs or 0) if self.logprobs else None
        limit = self._limit()
        if limit is None:
            limit = defaults.get("max_tokens")
        return self.sampling_params(limit, defaults, logprobs=count)

    def _limit(self) -> int | None:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(
                "max_tokens and max_completion_tokens differ; give one of them.",
                param="max_tokens",
            )
        return limits.pop() if limits else None


class TopLogprob(ResponseBody):
    """A token that could have been taken."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token that was taken, and those that could have been."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseBody):
    """Log-probabilities of an answer, or of a piece of it."""

    content: list[TokenLogprob]


class AnswerMessage(ResponseBody):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(ResponseBody):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class ChatResponse(ResponseBody):
    """All answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(ResponseBody):
    """A piece of one answer; its delta holds ``role`` once, then ``content``."""

    index: int
    delta: dict[str, str]
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class ChatChunk(ResponseBody):
    """A part of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


def _renamed(error: SamplingParamsError, names: Mapping[str, str]) -> SamplingParamsError:
    """Return *error* with the names that the fields have here."""
    message = re.sub(r"\w+(?==)", lambda found: names.get(found[0], found[0]), str(error))
    return SamplingParamsError(message, names.get(error.parameter or "", error.parameter))


def _with_arguments(call: Any) -> Any:
    """Clients send the arguments of a call as JSON in a string; templates print objects."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": value}}

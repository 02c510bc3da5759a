"""``/v1/chat/completions``."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import pydantic

from opweave_engine import FinishReason, SamplingParams, SamplingParamsError
from opweave_engine.server.errors import ApiError
from opweave_engine.server.protocol.base import (
    GeneratedBody,
    Int,
    Items,
    PromptLogprobs,
    RequestBody,
    RequestFields,
    ResponseBody,
    Text,
    Unused,
    Usage,
    harmless,
    refused,
    supported,
)
from opweave_engine.server.protocol.sampling import SamplingFields

ChatFinishReason = FinishReason | Literal["tool_calls"]
# Fields of a request that chat_template_kwargs may hold instead, and those that it may not.
_MOVABLE = ("add_generation_prompt", "continue_final_message", "documents")
_RESERVED = {"messages", "tools", "chat_template"}
_MAX_MESSAGES = 16_384  # with content parts; validating them blocks other requests for 0.1 s

_NO_HINTS = "The prefix cache needs no hints."
TEXT_ONLY = "The model takes text only."
TOOL_CHOICE_NOTE = "none, auto, required, or the function to call."
PARALLEL_NOTE = "Whether there may be several calls; true by default."
ToolChoice = Text | dict[str, Any]


class ContentPart(RequestFields):
    """A part of a message; its type determines the field with the text."""

    type: Text | None = supported("text, input_text, output_text, refusal, thinking: all are text.")
    text: Text | None = supported("The text of the part.")
    refusal: Text | None = supported("The text of a part of that type.")
    thinking: Text | None = supported("The text of a part of that type.")
    prompt_cache_breakpoint: Unused = harmless(_NO_HINTS)
    image_url: Unused = refused(TEXT_ONLY)
    image_embeds: Unused = refused(TEXT_ONLY)
    video_url: Unused = refused(TEXT_ONLY)
    audio_url: Unused = refused(TEXT_ONLY)
    input_audio: Unused = refused(TEXT_ONLY)
    file: Unused = refused(TEXT_ONLY)


class ChatMessage(RequestFields):
    """A message; the chat template reads the fields that are not listed here."""

    is_open = True

    role: Annotated[Text, pydantic.Field(min_length=1)] = pydantic.Field(
        description="The author's role: one that the chat template accepts."
    )
    content: Text | Items[Text | ContentPart] | None = supported(
        "Text, or a list of parts; null is empty text."
    )
    name: Any = supported("Goes to the chat template.")
    tool_call_id: Any = supported("Goes to the chat template.")
    tool_calls: Any = supported(
        "Go to the chat template, with arguments as it prints them: objects or JSON text."
    )
    audio: Unused = refused(TEXT_ONLY)
    function_call: Unused = refused("Use messages.tool_calls.")
    refusal: Unused = refused("Send it as content.")

    def as_dict(self) -> dict[str, Any]:
        """Return the message with every field that was sent."""
        sent = {"content": None, **_sent(self)}
        if isinstance(content := self.content, list):
            sent["content"] = [part if isinstance(part, str) else _sent(part) for part in content]
        return sent


def _sent(fields: RequestFields) -> dict[str, Any]:
    return {name: value for name, value in fields if name in fields.model_fields_set}


class TextOnly(RequestBody):
    """A request to a model without other inputs than text."""

    mm_processor_kwargs: Unused = refused(TEXT_ONLY, {})
    media_io_kwargs: Unused = refused(TEXT_ONLY, {})


class Conversation(TextOnly):
    """A conversation, which the chat template renders as a prompt."""

    messages: Items[ChatMessage] = pydantic.Field(
        min_length=1,
        description="The conversation. Fields of messages that are not listed go to the chat "
        "template.",
    )
    tools: Items[dict[str, Any]] | None = supported("Functions that the model may call.")
    documents: Items[dict[str, Any]] | None = supported("Documents for the chat template to print.")
    add_generation_prompt: bool | None = supported(
        "End the prompt with the header of an answer; default: not continue_final_message."
    )
    continue_final_message: bool | None = supported("End the prompt with the last message's text.")
    chat_template: Text | None = supported(
        "A name such as tool_use, or, with --trust-request-chat-template, a template."
    )
    chat_template_kwargs: dict[str, Any] | None = supported("Variables for the chat template.")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _move_from_variables(cls, values: Any) -> Any:
        """Move fields in ``chat_template_kwargs`` to the fields of the same names."""
        variables = values.get("chat_template_kwargs") if isinstance(values, Mapping) else None
        if not isinstance(variables, Mapping):
            return values
        moved = {name: variables[name] for name in _MOVABLE if variables.get(name) is not None}
        for name, value in moved.items():
            if values.get(name, value) not in (None, value):
                raise ApiError(
                    f"{name}={values[name]!a} differs from {value!a} in chat_template_kwargs; "
                    "give one of them.",
                    param=name,
                )
        others = {name: value for name, value in variables.items() if name not in _MOVABLE}
        return {**values, **moved, "chat_template_kwargs": others}

    @pydantic.field_validator("messages", mode="before")
    @classmethod
    def _limit_messages(cls, messages: object) -> object:
        """Refuse a conversation that would take long to validate."""
        if isinstance(messages, list):
            contents = (message.get("content") for message in messages if isinstance(message, dict))
            parts = sum(len(content) for content in contents if isinstance(content, list))
            if len(messages) + parts > _MAX_MESSAGES:
                raise ValueError(
                    f"has {len(messages)} messages with {parts} content parts, but the server "
                    f"takes at most {_MAX_MESSAGES} of both together"
                )
        return messages

    @pydantic.field_validator("chat_template_kwargs")
    @classmethod
    def _no_clash(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        if clash := sorted(_RESERVED & (variables or {}).keys()):
            raise ValueError(f"cannot hold {', '.join(clash)}, which the request itself has")
        return variables

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The functions that the prompt must describe to the model."""
        return self.tools

    def for_template(self) -> list[dict[str, Any]]:
        """Return the messages as dictionaries."""
        return [message.as_dict() for message in self.messages]

    def template_arguments(self) -> dict[str, Any]:
        """Return the other arguments of :meth:`opweave_engine.ChatTemplate.render`, by name."""
        fields = {name: getattr(self, name) for name in _MOVABLE} | {"tools": self.shown_tools}
        arguments = {name: value for name, value in fields.items() if value is not None}
        return {**(self.chat_template_kwargs or {}), **arguments}


class Stored(RequestBody):
    """A request whose answer OpenAI's servers store."""

    store: Unused = harmless("Nothing is stored.")
    safety_identifier: Unused = harmless("Not used.")
    prompt_cache_key: Unused = harmless(_NO_HINTS)
    prompt_cache_options: Unused = harmless(_NO_HINTS)
    prompt_cache_retention: Unused = harmless(_NO_HINTS)
    service_tier: Unused = harmless("There is one tier.")


class ChatRequest(SamplingFields, Conversation, Stored):
    """Answer a conversation."""

    max_completion_tokens: Int | None = supported("As max_tokens, which it overrides.")
    logprobs: bool | None = supported("Whether to return log-probabilities.")
    top_logprobs: Int | None = supported("Log-probabilities of this many tokens; needs logprobs.")
    best_of: Unused = refused("Use n.", 1)
    echo: Unused = refused("The prompt is not repeated.", False)
    prediction: Unused = harmless("It would only save time.")
    tool_choice: ToolChoice | None = supported(TOOL_CHOICE_NOTE)
    parallel_tool_calls: bool | None = supported(PARALLEL_NOTE)
    functions: Unused = refused("Describe them in tools.", [])
    function_call: Unused = refused("Use tool_choice.", "none", "auto")
    reasoning_effort: Unused = refused("Use chat_template_kwargs if the template reads it.")
    include_reasoning: bool | None = supported("Return the reasoning; true by default.")
    thinking_token_budget: Unused = refused("Use max_tokens.", -1)
    verbosity: Unused = refused("Ask for it in a message.", "medium")
    audio: Unused = refused("Answers are text only.")
    modalities: Unused = refused('Answers are text only; the list may hold "text".', [], ["text"])
    moderation: Unused = refused("Moderation is not supported.")
    web_search_options: Unused = refused("The server does not search the web.")
    metadata: Unused = harmless("Nothing is stored.")

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
    def shown_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    @property
    def limit_field(self) -> str:
        """The field that limits the length of the answer."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def _params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs=true.", param="top_logprobs")
        count = (self.top_logprobs or 0) if self.logprobs else None
        limit = getattr(self, self.limit_field)
        if limit is None:
            limit = defaults.get("max_tokens")
        return self.sampling_params(
            limit, defaults, logprobs=count, prompt_logprobs=self.prompt_logprobs
        )


class TopLogprob(ResponseBody):
    """A likely token, with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """The sampled token, and the most likely tokens."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseBody):
    """Log-probabilities of an answer or a delta."""

    content: list[ChatTokenLogprob]


class CalledFunction(ResponseBody):
    """A function, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(ResponseBody):
    """A call of a function."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(ResponseBody):
    """The answer; missing parts are omitted."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @pydantic.model_serializer(mode="wrap")
    def _without_absent(self, handler: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {k: v for k, v in fields.items() if v is not None or k == "content"}


class ChatChoice(ResponseBody):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(GeneratedBody):
    """All answers."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatChunkChoice(ResponseBody):
    """A delta of one answer; the first one has the ``role``."""

    index: int
    delta: dict[str, Any]
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(GeneratedBody):
    """An event of a stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


def _renamed(error: SamplingParamsError, names: Mapping[str, str]) -> SamplingParamsError:
    """Return *error* with this endpoint's names of the fields."""
    message = re.sub(r"\w+(?==)", lambda match: names.get(match[0], match[0]), str(error))
    return SamplingParamsError(message, names.get(error.parameter or "", error.parameter))

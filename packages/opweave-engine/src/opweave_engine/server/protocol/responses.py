"""``/v1/responses``."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field

from opweave_engine.server.errors import ApiError, unsupported
from opweave_engine.server.protocol import chat
from opweave_engine.server.protocol.base import (
    Int,
    Items,
    RequestFields,
    Text,
    Unused,
    harmless,
    refused,
    supported,
)
from opweave_engine.server.protocol.sampling import SALT_NOTE, CacheSalt

_USE_CHAT = "Use /v1/chat/completions."
_NOT_STORED = "Nothing is stored; send the whole conversation as input."
_T = TypeVar("_T")


def _check_finite(value: _T) -> _T:
    """Refuse infinities and NaN, which a response in JSON cannot repeat."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError("a number in it is not finite; the response would repeat it") from error
    return value


# A field that the response repeats.
Repeated = Annotated[_T, AfterValidator(_check_finite)]
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


class TextOptions(RequestFields):
    """The format of the answer."""

    format: Repeated[dict[str, Any]] | None = supported(
        "text, json_object or json_schema, with a schema."
    )
    verbosity: Unused = refused("Ask for it in the input.", "medium")


class ResponsesRequest(chat.Stored):
    """Answer a conversation, with OpenAI's Responses API."""

    input: Text | Items[dict[str, Any]] = Field(
        description="A text, or a list of messages, function_call, function_call_output and "
        "reasoning items."
    )
    instructions: Text | None = supported("A system message before the input.")
    max_output_tokens: Int | None = supported("The maximum number of tokens of the answer.")
    temperature: float | None = supported("From 0, which is greedy, to 2.")
    top_p: float | None = supported("Sample from the most likely tokens up to this probability.")
    stream: bool | None = supported("Send the answer as server-sent events.")
    text: TextOptions | None = supported("The form of the answer.")
    tools: Repeated[Items[dict[str, Any]]] | None = supported("Functions that the model may call.")
    tool_choice: Repeated[chat.ToolChoice] | None = supported(chat.TOOL_CHOICE_NOTE)
    parallel_tool_calls: bool | None = supported(chat.PARALLEL_NOTE)
    metadata: Repeated[dict[str, Any]] | None = supported("Returned in the response.")
    cache_salt: CacheSalt | None = supported(SALT_NOTE)
    top_logprobs: Unused = refused(_USE_CHAT, 0)
    include: Unused = refused("Additional output data is not supported.", [])
    reasoning: Unused = refused("Use chat_template_kwargs of /v1/chat/completions.", {})
    top_k: Unused = refused(_USE_CHAT, 0, -1)
    min_p: Unused = refused(_USE_CHAT, 0)
    repetition_penalty: Unused = refused(_USE_CHAT, 1)
    presence_penalty: Unused = refused(_USE_CHAT, 0)
    frequency_penalty: Unused = refused(_USE_CHAT, 0)
    logit_bias: Unused = refused(_USE_CHAT, {})
    seed: Unused = refused(_USE_CHAT)
    stop: Unused = refused(_USE_CHAT, [])
    skip_special_tokens: Unused = refused(_USE_CHAT, True)
    include_stop_str_in_output: Unused = refused(_USE_CHAT, False)
    ignore_eos: Unused = refused(_USE_CHAT, False)
    structured_outputs: Unused = refused("Use text.format.")
    request_id: Unused = refused("The server generates the ids of responses.")
    priority: Unused = refused(_USE_CHAT, 0)
    mm_processor_kwargs: Unused = refused(chat.TEXT_ONLY, {})
    vllm_xargs: Unused = refused("vLLM's extensions are not supported.", {})
    kv_transfer_params: Unused = refused("Disaggregated serving is not supported.", {})
    previous_input_messages: Unused = refused(_NOT_STORED, [])
    enable_response_messages: Unused = refused("Messages are not returned.", False)
    max_tool_calls: Unused = refused("The server does not call tools.")
    truncation: Unused = refused("Shorten the input.", "disabled")
    background: Unused = refused(_NOT_STORED, False)
    background_options: Unused = refused(_NOT_STORED)
    context_management: Unused = refused(_NOT_STORED, [])
    conversation: Unused = refused(_NOT_STORED)
    previous_response_id: Unused = refused(_NOT_STORED)
    prompt: Unused = refused(_NOT_STORED)
    image: Unused = refused("Answers are text only.")
    moderation: Unused = refused("Moderation is not supported.")
    access_programs: Unused = refused("There are no programs.")
    stream_options: Unused = harmless("Events are not padded.")

    def as_chat(self) -> dict[str, Any]:
        """Return the body of the equivalent chat completion.

        Raises:
            ApiError: the input has an item that is neither text nor a call.
        """
        values = {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": self._response_format(),
            "tools": [_tool(tool, f"tools.{i}") for i, tool in enumerate(self.tools or [])] or None,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "cache_salt": self.cache_salt,
        }
        return {name: value for name, value in values.items() if value is not None}

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for index, item in enumerate(self.input):
            _add(item, messages, f"input.{index}")
        for message in messages:
            # One join: adding to a text copies it, which is quadratic in the number of items.
            if message["role"] == "assistant" and "content" in message:
                message["content"] = "".join(message["content"])
        return [message for message in messages if message.keys() > {"role"}]

    def _response_format(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if form is None or form.get("type") != "json_schema":
            return form
        return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _add(item: Mapping[str, Any], messages: list[dict[str, Any]], path: str) -> None:
    """Add an item of the input; the items of one turn of the model form one message."""
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        content = _text(item.get("content"), path)
        if item.get("role") == "assistant":
            _turn(messages).setdefault("content", []).append(content)
        else:
            messages.append({"role": item.get("role"), "content": content})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _text(item.get("output"), path)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or []
        text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
        if text:
            _turn(messages)["reasoning_content"] = text
    else:
        raise unsupported(
            f"{path}.type",
            f"{path}.type={kind!r}",
            "Items may be messages, function_call, function_call_output and reasoning.",
        )


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: object, path: str) -> str:
    """Return the text of a message or of a function's output."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ApiError(f"{path} must have text, or a list of parts.", param="input")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise unsupported(
                f"{path}.content", f"{path}: a part of type {kind!r}", "The model takes text only."
            )
        texts.append(str(part.get("refusal" if kind == "refusal" else "text", "")))
    return "".join(texts)


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(
            f"{path}.type", f"{path}.type={tool.get('type')!r}", "Tools are functions."
        )
    names = ("name", "description", "parameters")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }

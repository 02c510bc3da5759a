"""``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opweave_engine.server.errors import ApiError, unsupported
from opweave_engine.server.protocol.base import Int, Items, RequestBody, RequestFields, Text
from opweave_engine.server.protocol.sampling import CacheSalt

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


class TextOptions(RequestFields):
    """The format of the answer."""

    format: dict[str, Any] | None = None


class ResponsesRequest(RequestBody):
    """Answer a conversation, with OpenAI's Responses API."""

    endpoint = "responses"

    input: Text | Items[dict[str, Any]]
    instructions: Text | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None

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
            "tools": [_tool(each, f"tools.{i}") for i, each in enumerate(self.tools or [])] or None,
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
        given = None if self.text is None else self.text.format
        if given is None or given.get("type") != "json_schema":
            return given
        return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


def _add(item: Mapping[str, Any], messages: list[dict[str, Any]], path: str) -> None:
    """Add an item of the input; the items of one turn of the model form one message."""
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        content = _content(item.get("content"), path)
        if item.get("role") == "assistant":
            turn = _turn(messages)
            turn.setdefault("content", []).append(content)
        else:
            messages.append({"role": item.get("role"), "content": content})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _content(item.get("output"), path)
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


def _content(given: object, path: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, Sequence):
        raise ApiError(f"{path} must have text, or a list of parts.", param="input")
    texts = []
    for part in given:
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

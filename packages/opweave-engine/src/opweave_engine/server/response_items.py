"""The items of a response, built from the events of an answer."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from opweave_engine.server.output import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Event,
    ReasoningDelta,
)

Item = dict[str, Any]


class ResponseItems:
    """Collects the items of one response: reasoning, messages and calls.

    Attributes:
        items: the items so far.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._is_open = False

    def add(self, event: Event, call_id: str | None) -> Iterator[Item]:
        """Process an event, and yield OpenAI's events for it, without sequence numbers.

        *call_id* is the id of the call if one begins.
        """
        match event:
            case ReasoningDelta(text):
                yield from self._need("reasoning", "reasoning_text")
                yield from self._text("response.reasoning_text.delta", text)
            case ContentDelta(text):
                yield from self._need("message", "output_text")
                yield from self._text("response.output_text.delta", text)
            case CallStart(name):
                yield from self.close()
                yield from self._open(
                    "function_call", "fc", call_id=call_id, name=name, arguments=""
                )
            case ArgumentsDelta(text):
                self.items[-1]["arguments"] += text
                yield self._event("response.function_call_arguments.delta", delta=text)

    def close(self, status: str = "completed") -> Iterator[Item]:
        """Complete the last item."""
        if not self._is_open:
            return
        self._is_open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            arguments, name = item["arguments"], item["name"]
            kind = "response.function_call_arguments.done"
            yield self._event(kind, arguments=arguments, name=name)
        else:
            (part,) = item["content"]
            more: Item = {"logprobs": []} if part["type"] == "output_text" else {}
            kind = f"response.{part['type']}.done"
            yield self._event(kind, content_index=0, text=part["text"], **more)
            yield self._event("response.content_part.done", content_index=0, part=dict(part))
        index = len(self.items) - 1
        yield {"type": "response.output_item.done", "output_index": index, "item": _copy(item)}

    def finish(self, status: str) -> Iterator[Item]:
        """Complete the response; if it has no items, add an empty message."""
        if not self.items:
            yield from self._need("message", "output_text")
        yield from self.close(status)

    def _need(self, kind: str, part_type: str) -> Iterator[Item]:
        if self._is_open and self.items[-1]["type"] == kind:
            return
        yield from self.close()
        more: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
        yield from self._open(kind, "msg" if kind == "message" else "rs", content=[], **more)
        part: Item = {"type": part_type, "text": ""}
        if part_type == "output_text":
            part |= {"annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        yield self._event("response.content_part.added", content_index=0, part=dict(part))

    def _open(self, kind: str, prefix: str, **fields: Any) -> Iterator[Item]:
        name, self._is_open = f"{prefix}_{uuid.uuid4().hex}", True
        self.items.append({"type": kind, "id": name, "status": "in_progress", **fields})
        index = len(self.items) - 1
        item = _copy(self.items[-1])
        yield {"type": "response.output_item.added", "output_index": index, "item": item}

    def _text(self, kind: str, text: str) -> Iterator[Item]:
        self.items[-1]["content"][0]["text"] += text
        more: Item = {"logprobs": []} if kind == "response.output_text.delta" else {}
        yield self._event(kind, content_index=0, delta=text, **more)

    def _event(self, kind: str, **fields: Any) -> Item:
        index = len(self.items) - 1
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": index, **fields}


def _copy(item: Item) -> Item:
    """Return a copy of the item."""
    content = item.get("content")
    return item if content is None else {**item, "content": [dict(part) for part in content]}

"""The formats in which models write tool calls."""

from __future__ import annotations

import json
import uuid

from opweave_engine.server.output.call_format import CallFormat, CallLayout
from opweave_engine.server.output.source import MalformedError, Steps


class Hermes(CallFormat):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write."""

    opener = "<tool_call>"
    closers = ("</tool_call>",)
    markers = (opener, *closers)

    @classmethod
    def layout(cls, template: str) -> CallLayout:
        return CallLayout(
            head=lambda name: f'{cls.opener}\n{{"name": {json.dumps(name)}, "arguments": ',
            tail=f"}}\n{cls.closers[0]}",
            separator="\n",
        )

    def _parse_calls(self) -> Steps[None]:
        yield from self._call_object()


class LlamaJson(CallFormat):
    """``{"name": ..., "parameters": {...}}``, alone or separated by semicolons, as of Llama 3.

    An answer that begins with an object is a call only if it names a function of the request.
    """

    opener = "<|python_tag|>"
    markers = (opener,)

    @classmethod
    def layout(cls, template: str) -> CallLayout:
        return CallLayout(
            head=lambda name: f'{{"name": {json.dumps(name)}, "parameters": ',
            tail="}",
            separator="; ",
        )

    def _begin(self) -> Steps[None]:
        if (yield from self._source.skip_spaces()) == "{":
            yield from self._attempt(0, 0)
        else:
            self._source.position = 0

    def _parse_calls(self) -> Steps[None]:
        source = self._source
        yield from self._call_object(is_strict=True)
        while (yield from source.skip_spaces()) == ";":
            source.position += 1
            yield from self._call_object(is_strict=True)


class Mistral(CallFormat):
    """``[TOOL_CALLS]`` and a list of calls, or ``[TOOL_CALLS]name[ARGS]{...}``."""

    opener = "[TOOL_CALLS]"
    markers = (opener, "[CALL_ID]", "[ARGS]")

    @classmethod
    def layout(cls, template: str) -> CallLayout:
        if "[ARGS]" in template:
            return CallLayout(head=lambda name: f"{cls.opener}{name}[ARGS]")
        return CallLayout(
            opening=f"{cls.opener}[",
            head=lambda name: f'{{"name": {json.dumps(name)}, "arguments": ',
            tail="}",
            separator=", ",
            closing="]",
        )

    @classmethod
    def new_id(cls) -> str:
        return uuid.uuid4().hex[:9]  # Mistral's templates take nothing else

    def _parse_calls(self) -> Steps[None]:
        source = self._source
        first = yield from source.skip_spaces()
        if first == "[":
            source.position += 1
            yield from self._call_object()
            while (yield from source.skip_spaces()) == ",":
                source.position += 1
                yield from self._call_object()
            yield from source.expect("]")
        elif first == "{":
            yield from self._call_object()
        else:
            yield from self._named()

    def _named(self) -> Steps[None]:
        source = self._source
        name = yield from self._word()
        if (yield from source.take("[CALL_ID]")):
            yield from self._word()
        yield from source.take("[ARGS]")
        if not name or (yield from source.skip_spaces()) != "{":
            raise MalformedError
        self._start(name)
        yield from self._value(self._arguments)
        self._end()

    def _word(self) -> Steps[str]:
        source = self._source
        start = source.position
        while (character := (yield from source.peek())) and (
            character.isalnum() or character in "_-."
        ):
            source.position += 1
        return source.text[start : source.position]


class DeepSeek(CallFormat):
    """Calls between DeepSeek's markers: with the word ``function`` and a code block, or bare."""

    opener = "<｜tool▁calls▁begin｜>"
    begin, separator = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    closers = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    markers = (opener, begin, separator, *closers)

    @classmethod
    def layout(cls, template: str) -> CallLayout:
        is_block = "```json" in template
        before, after = f"{cls.begin}function{cls.separator}", "\n```json\n"
        return CallLayout(
            opening=cls.opener,
            head=lambda name: (
                f"{before}{name}{after}" if is_block else f"{cls.begin}{name}{cls.separator}"
            ),
            tail=("\n```" if is_block else "") + cls.closers[0],
            separator="\n" if is_block else "",
            closing=cls.closers[1],
        )

    def _parse_calls(self) -> Steps[None]:
        source = self._source
        yield from source.skip_spaces()
        yield from source.expect(self.begin)
        is_call = True
        while is_call:
            yield from self._call()
            yield from source.skip_spaces()
            is_call = yield from source.take(self.begin)
        yield from source.take(self.closers[1])

    def _call(self) -> Steps[None]:
        source = self._source
        name = yield from self._text_before(self.separator)
        if (yield from source.skip_spaces()) != "{":  # what came first is the kind of the tool
            name = yield from self._text_before("\n")
            yield from source.skip_spaces()
            yield from source.take("```json")
        if not name or (yield from source.skip_spaces()) != "{":
            raise MalformedError
        self._start(name)
        yield from self._value(self._arguments)
        yield from source.skip_spaces()
        yield from source.take("```")
        yield from source.skip_spaces()
        yield from source.take(self.closers[0])
        self._end()

    def _text_before(self, marker: str) -> Steps[str]:
        parts: list[str] = []
        if (yield from self._source.until([marker], parts.append)) is None:
            raise MalformedError
        return "".join(parts).strip()

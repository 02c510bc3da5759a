"""Random histories, written in any way that clients write them, give the prompt of transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import chat_templates as of
from engine.test_chat_messages import TOOLS, compiled, ours, parts, theirs
from support.hypothesis_profiles import examples

Message = dict[str, Any]
_LETTERS = st.characters(exclude_categories=["Cs", "Co", "Cn"])
_TEXTS = st.text(_LETTERS, max_size=12) | st.sampled_from(["OK! ", " x\n\n", "<b>'&", "a\nb", "{}"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | _TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXTS, inner, max_size=2),
    max_leaves=4,
)
_ARGUMENTS = st.dictionaries(st.text("abé", min_size=1, max_size=3), _VALUES, max_size=3)
_NULLS = ("refusal", "audio", "function_call", "name", "annotations", "reasoning")


@dataclass(frozen=True)
class Family:
    """The messages that a template accepts, and their form for transformers."""

    template: str
    content: Literal["string", "parts", "either"] = "string"
    arguments: Literal["text", "object"] = "object"
    most_calls: int = 2
    has_system: bool = True
    reasons: bool = False
    assistants_write_strings: bool = False


FAMILIES = {
    "llama3": Family(of.LLAMA3, most_calls=1),
    "mistral": Family(of.MISTRAL),
    "mistral parts": Family(of.MISTRAL_PARTS, content="either", most_calls=0,
                            assistants_write_strings=True),
    "deepseek": Family(of.DEEPSEEK, arguments="text"),
    "qwen3": Family(of.QWEN3, reasons=True),
    "items": Family(of.ITEMS),
    "gemma3": Family(of.GEMMA3, content="either", most_calls=0),
    "hermes": Family(of.HERMES),
    "llava": Family(of.LLAVA, content="parts", most_calls=0),
    "first part": Family(of.FIRST_PART, content="parts", most_calls=0),
    "half guarded": Family(of.HALF_GUARDED, content="parts", most_calls=0),
    "macro": Family(of.MACRO, content="either", most_calls=0),
    "thinking": Family(of.THINKING, most_calls=1, reasons=True),
}  # fmt: skip


class Histories:
    """Draws a conversation twice: as a client may send it, and as transformers needs it."""

    def __init__(self, family: Family, data: st.DataObject) -> None:
        self._family, self._draw = family, data.draw

    def pick(self, *options: Any) -> Any:
        return self._draw(st.sampled_from(options))

    def history(self) -> tuple[list[Message], list[Message]]:
        pairs = []
        if self._family.has_system and self.pick(True, False):
            pairs.append(self._message("system", may_be_in_parts=False))
        for _ in range(self._draw(st.integers(1, 3))):
            pairs += [self._message("user"), *self._answer()]
        if self.pick(True, False):
            pairs.append(self._message("user"))
        sent, canonical = zip(*pairs, strict=True)
        return list(sent), list(canonical)

    def _answer(self) -> list[tuple[Message, Message]]:
        count = self._draw(st.integers(0, self._family.most_calls))
        sent, canonical = self._message(
            "assistant", is_string=self._family.assistants_write_strings
        )
        if self._family.reasons and (reasoning := self._draw(_TEXTS)):
            sent[self.pick("reasoning", "thinking", "reasoning_content")] = reasoning
            canonical["reasoning_content"] = reasoning
        if not count:
            sent |= self.pick({}, {"tool_calls": []}, {"tool_calls": None})
            return [(sent, canonical)]
        calls = [self._call() for _ in range(count)]
        sent["tool_calls"], canonical["tool_calls"] = (
            list(each) for each in zip(*calls, strict=True)
        )
        return [(sent, canonical), *(self._message("tool") for _ in range(count)),
                self._message("assistant")]  # fmt: skip

    def _message(
        self, role: str, *, may_be_in_parts: bool = True, is_string: bool = False
    ) -> tuple[Message, Message]:
        texts = self._draw(st.lists(_TEXTS, min_size=1, max_size=2 if may_be_in_parts else 1))
        whole = len(texts) == 1 and self.pick(True, False)
        sent: Any = texts[0] if whole else [self._part(text) for text in texts]
        if whole and not texts[0]:
            sent = self.pick("", None)
        joined = ("" if is_string else "\n").join(texts)
        if self._family.content == "string":
            canonical: Any = joined
        elif self._family.content == "either" and (whole or is_string):
            canonical = joined
        else:
            canonical = parts(*texts)
        message = {"role": role, "content": sent}
        if sent is None and self.pick(True, False):
            del message["content"]
        nulls = self._draw(st.sets(st.sampled_from(_NULLS), max_size=3))
        return {**message, **dict.fromkeys(nulls)}, {"role": role, "content": canonical}

    def _part(self, text: str) -> Any:
        return self.pick(
            text,
            {"type": "text", "text": text},
            {"type": "output_text", "text": text},
            {"type": "refusal", "refusal": text},
            {"text": text},
        )

    def _call(self) -> tuple[Message, Message]:
        arguments = self._draw(_ARGUMENTS)
        written = self.pick(
            json.dumps(arguments),
            json.dumps(arguments, ensure_ascii=False, separators=(",", ":")),
            json.dumps(arguments, indent=1),
        )
        sent = self.pick(arguments, written)
        text = (
            written if sent is written and arguments else json.dumps(arguments, ensure_ascii=False)
        )
        if not arguments:
            sent = self.pick({}, "{}", "", "null", None, " ")
        canonical = text if self._family.arguments == "text" else arguments
        return self._with_arguments(sent), self._with_arguments(canonical)

    @staticmethod
    def _with_arguments(arguments: Any) -> Message:
        function = {"name": "add", "arguments": arguments}
        return {"id": "abcdefghi", "type": "function", "function": function}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@examples(60)
@given(data=st.data())
def test_prompts_are_those_of_transformers(family: Family, data: st.DataObject) -> None:
    sent, canonical = Histories(family, data).history()
    options = {"add_generation_prompt": data.draw(st.booleans())}
    uses_tools = "tools" in compiled(family.template).traits.variables
    tools = TOOLS if uses_tools and data.draw(st.booleans()) else None
    expected = theirs(family.template, canonical, tools=tools, **options)
    assert ours(family.template, sent, tools=tools, **options) == expected


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@examples(30)
@given(data=st.data())
def test_continued_prompts_are_those_of_transformers(family: Family, data: st.DataObject) -> None:
    sent, canonical = Histories(family, data).history()
    text = data.draw(_TEXTS.filter(str.strip))
    last = {"role": "assistant", "content": text}
    written = {**last, "content": parts(text)} if family.content == "parts" else last
    if sent[-1]["role"] != "user":
        del sent[-1], canonical[-1]
    if sent[-1]["role"] != "user":
        return  # after a call come its results
    prompt = ours(family.template, [*sent, last], continue_final_message=True)
    expected = theirs(
        family.template,
        [*canonical, written],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    # Where the template trims content, transformers drops white space at the end of the text.
    assert prompt.rstrip() == expected.rstrip()
    assert prompt.endswith(text.lstrip())

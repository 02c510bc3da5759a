"""``LLM.chat`` answers what the template writes, as transformers would."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.tiny_checkpoints import BOS
from opweave.engine import LLM, ChatTemplateError, PromptError, SamplingParams

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}{{ mood }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the dog"}]

CLASHING: dict[str, Any] = {"self": 1, "context": 2, "template": 3}


@pytest.fixture(scope="module")
def llm(
    checkpoint: Callable[[str], tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory
) -> LLM:
    path = Path(shutil.copytree(checkpoint("llama")[0], tmp_path_factory.mktemp("chat") / "llama"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return LLM(path)


def test_a_conversation_is_its_text(llm: LLM) -> None:
    (output,) = llm.chat(HELLO, GREEDY)
    text = "<s><system>Be brief.</s><user>the dog</s><assistant>"
    assert output.prompt == text
    assert output.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    assert output.prompt_token_ids.count(BOS) == 1  # the template writes it, and nobody else
    (plain,) = llm.generate(output.prompt_token_ids, GREEDY)
    assert output.outputs == plain.outputs


def test_several_conversations_at_once(llm: LLM) -> None:
    other = [{"role": "user", "content": "naïve"}]
    together = llm.chat([HELLO, other], [GREEDY, SamplingParams(seed=1, n=2)])
    assert together[0].outputs == llm.chat(HELLO, GREEDY)[0].outputs
    assert together[1].outputs == llm.chat(other, SamplingParams(seed=1, n=2))[0].outputs
    assert llm.chat([]) == []


def test_what_the_template_is_given(llm: LLM) -> None:
    (output,) = llm.chat(
        HELLO[1:], GREEDY, tools=[{"type": "function"}], mood="!", add_generation_prompt=False
    )
    assert output.prompt == "<s><user>the dog</s>1!"
    (output,) = llm.chat(HELLO, GREEDY, chat_template="{{ context }}", **CLASHING)
    assert output.prompt == "2"
    (output,) = llm.chat(HELLO, GREEDY, chat_template="{{ messages | length }}{{ eos_token }}")
    assert output.prompt == "2</s>"


@pytest.mark.parametrize("messages", ["hello", None, [[]], [1], [{"content": "x"}], [HELLO, "x"]])
def test_what_is_no_conversation(messages: Any, llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"list of messages|a dict like"):
        llm.chat(messages)


def test_a_checkpoint_without_a_template(checkpoint: Callable[[str], tuple[Path, Any]]) -> None:
    llm = LLM(checkpoint("llama")[0])
    with pytest.raises(ChatTemplateError, match=r"no chat template.*chat_template="):
        llm.chat(HELLO)
    assert llm.chat(HELLO, GREEDY, chat_template="{{ messages[1].content }}")

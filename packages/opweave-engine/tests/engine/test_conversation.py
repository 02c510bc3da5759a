"""``LLM.chat`` answers what the template writes, as transformers would."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from models.tiny_checkpoints import BOS, Checkpoints
from opweave_engine import LLM, ChatTemplateError, EngineError, PromptError, SamplingParams

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}{{ mood }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the dog"}]

CLASHING: dict[str, Any] = {"self": 1, "context": 2, "template": 3}


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> LLM:
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
    (output,) = llm.chat(
        HELLO, GREEDY, chat_template="{{ context }}", chat_template_kwargs=CLASHING
    )
    assert output.prompt == "2"
    (output,) = llm.chat(HELLO, GREEDY, chat_template="{{ messages | length }}{{ eos_token }}")
    assert output.prompt == "2</s>"


def test_variables_as_keywords_and_by_name(llm: LLM) -> None:
    by_name = llm.chat(HELLO, GREEDY, chat_template_kwargs={"mood": "!", "other": 1})
    assert by_name[0].prompt == llm.chat(HELLO, GREEDY, mood="!")[0].prompt
    documents = [{"text": "x"}]
    (output,) = llm.chat(
        HELLO, GREEDY, chat_template="{{ documents[0].text }}", documents=documents
    )
    assert output.prompt == "x"


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        ("continue_final_mesage", "continue_final_message"),
        ("add_generation_promt", "add_generation_prompt"),
        ("sampling_parms", "sampling_params"),
        ("document", "documents"),
        ("chat_templates", "chat_template"),
        ("moood", "mood"),
    ],
)
def test_misspelled_keywords(keyword: str, meant: str, llm: LLM) -> None:
    with pytest.raises(TypeError, match=f"'{keyword}' .*Did you mean '{meant}'") as raised:
        llm.chat(HELLO, GREEDY, **{keyword: True})
    assert isinstance(raised.value, EngineError)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "give one of them"),
        ({"chat_template_kwargs": {"tools": []}}, "cannot hold tools"),
        ({"chat_template_kwargs": [1]}, "must be a dict"),
        ({"documents": [{"text": "x"}]}, "does not use documents"),
        ({"tools": "x"}, "tools='x' must be a list"),
        ({"tools": ["x"]}, "must be a list of dicts"),
        ({"continue_final_message": "content"}, "'content' must be True or False"),
        ({"chat_template": "{{ messages[0].content }}", "tools": [{}]}, "does not use tools"),
    ],
)
def test_options_that_contradict_the_template(
    options: dict[str, Any], named: str, llm: LLM
) -> None:
    with pytest.raises(ValueError, match=named):
        llm.chat(HELLO, GREEDY, **options)


def test_parts_and_arguments_as_clients_send_them(llm: LLM) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    function = {"name": "f", "arguments": '{"x":1}'}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "the dog"}, "it"]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
    ]
    (output,) = llm.chat(history, GREEDY, chat_template=template)
    assert output.prompt == 'the dog\nit{"x": 1}'
    robot = [{"role": "robot", "content": "x"}]
    with pytest.raises(PromptError, match=r"^messages\.0\.role is 'robot'"):
        llm.chat(robot, GREEDY)
    with pytest.raises(PromptError, match=r"^conversation 1: messages\.0\.role is 'robot'"):
        llm.chat([HELLO, robot], GREEDY)


def test_messages_of_the_openai_client(llm: LLM) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    function = {"name": "f", "arguments": '{"x":1}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    message = ChatCompletionMessage.model_validate({"role": "assistant", "tool_calls": calls})
    prompts = [
        llm.chat(history, GREEDY, chat_template=template)[0].prompt
        for history in (
            [message, HELLO[1]],
            [{"role": "assistant", "tool_calls": message.tool_calls}, HELLO[1]],
        )
    ]
    assert prompts == ['assistantf{"x": 1}userthe dog'] * 2


@pytest.mark.parametrize("messages", ["hello", None, [[]], [1], [{"content": "x"}], [HELLO, "x"]])
def test_what_is_no_conversation(messages: Any, llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"list of messages|a dict like"):
        llm.chat(messages)


def test_a_checkpoint_without_a_template(checkpoint: Checkpoints) -> None:
    llm = LLM(checkpoint("llama")[0])
    with pytest.raises(ChatTemplateError, match=r"no chat template.*chat_template="):
        llm.chat(HELLO)
    assert llm.chat(HELLO, GREEDY, chat_template="{{ messages[1].content }}")

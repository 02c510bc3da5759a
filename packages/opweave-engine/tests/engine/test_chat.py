"""Chat templates render what transformers renders, and fail readably."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from transformers import PreTrainedTokenizerFast

from models.tiny_checkpoints import BOS, Checkpoints, edit_config
from opweave_engine import (
    LLM,
    ChatTemplate,
    ChatTemplateError,
    Checkpoint,
    EngineError,
    PromptError,
    SamplingParams,
)
from support import ROOT

SOURCE = ROOT / "examples" / "models" / "tiny-pydoc"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be <brief> & 'kind'.\n"},
    {"role": "user", "content": "Naïve 東京?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, "é"]}}}],
    },
    {"role": "tool", "content": "3"},
    {"role": "user", "content": "Thanks"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b>é</b>"}}]

TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + (m['content'] or '') }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    "blocks are trimmed": """
{%- for m in messages %}
    {% if loop.first and m.role == 'system' %}
[SYS]{{ m.content | trim }}[/SYS]
    {% elif m.content is not none %}
[{{ m.role | upper }}] {{ m.content }}
    {% endif %}
{%- endfor %}
{% if add_generation_prompt %}
[ASSISTANT]
{%- endif %}
""",
    "tools and JSON": "{% for t in tools or [] %}{{ t | tojson }}|{{ t | tojson(indent=2) }}"
    "{% endfor %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson(ensure_ascii=true) }}{% endfor %}{% endfor %}",
    "loop controls and namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n > 3 %}{% break %}{% endif %}{{ m.role[:2] }}{% endfor %}{{ ns.n }}",
    "generation marks": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}<{{ m.tool_calls | length }}>{% endgeneration %}{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}",
    "other variables": "{{ mood | default('none') }}{% if pad_token is defined %}pad{% endif %}"
    "{% macro f(x) %}({{ x }}){% endmacro %}{{ f(messages | length) }}",
}


def reference(template: str, **options: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(SOURCE / "tokenizer.json"), chat_template=template, **TOKENS
    )
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": TOOLS, "mood": "merry"},
    ],
)
def test_text_is_that_of_transformers(template: str, options: dict[str, Any]) -> None:
    text = ChatTemplate(template, "a test", TOKENS).render(MESSAGES, **options)
    assert text == reference(template, **options)


def test_today() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", "a test", {})
    assert template.render(MESSAGES) in (str(datetime.now().year - 1), str(datetime.now().year))


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('Roles must\\n alternate.') }}", "Roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", "nothing"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages | tojson('x', 'y', 'z', 'a', 'b', 'c') }}", "TypeError"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% include 'x' %}", "loader"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "underscore"),
        ("{{ namespace(_x=1) }}", "underscore"),
    ],
)
def test_templates_that_fail(source: str, named: str) -> None:
    template = ChatTemplate(source, "a test", {})
    with pytest.raises(ChatTemplateError, match=named):
        template.render(MESSAGES)


def test_what_is_no_jinja() -> None:
    with pytest.raises(ChatTemplateError, match=r"\(a test\) is not valid Jinja: line 2"):
        ChatTemplate("{{ 1 }}\n{% nothing %}", "a test", {})


@pytest.mark.parametrize(
    "source", ["{{ 10**100000 }}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"]
)
def test_what_cannot_be_compiled(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"\(a test\) cannot be compiled"):
        ChatTemplate(source, "a test", {})


def test_a_developer_is_the_system_where_nobody_knows_developers() -> None:
    said = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}", "", {}).render(said) == "system"
    assert ChatTemplate("{# developer #}{{ messages[0].role }}", "", {}).render(said) == "developer"
    assert said[0]["role"] == "developer"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SOURCE / name, tmp_path)
    return tmp_path


def test_a_checkpoint_without_one(folder: Path) -> None:
    assert ChatTemplate.of(Checkpoint(folder)) is None


def test_where_checkpoints_keep_it(folder: Path) -> None:
    def rendered() -> str:
        template = ChatTemplate.of(Checkpoint(folder))
        return template.render(MESSAGES)

    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit_config(folder, "tokenizer_config.json", chat_template=named)
    assert rendered() == "d"
    edit_config(folder, "tokenizer_config.json", chat_template=named[:1])
    assert rendered() == "t"
    edit_config(
        folder,
        "tokenizer_config.json",
        chat_template="c{{ bos_token }}",
        bos_token={"content": "<b>"},
    )
    assert rendered() == "c<b>"
    (folder / "chat_template.jinja").write_text("f{{ eos_token }}")
    assert rendered() == "f</s>"
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja"):
        rendered()
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match="UTF-8"):
        rendered()


@pytest.mark.parametrize("kind", ["list", "object", "files", "both"])
def test_the_template_for_tools(folder: Path, kind: str) -> None:
    default, tools = "default{{ tools }}", "tools: {{ tools | length }}"
    if kind == "list":
        named = [{"name": "default", "template": default}, {"name": "tool_use", "template": tools}]
        edit_config(folder, "tokenizer_config.json", chat_template=named)
    elif kind == "object":
        edit_config(
            folder, "tokenizer_config.json", chat_template={"default": default, "tool_use": tools}
        )
    else:
        more = folder / "additional_chat_templates"
        more.mkdir()
        (more / "tool_use.jinja").write_text(tools)
        if kind == "both":  # a file is stronger than tokenizer_config.json
            edit_config(
                folder,
                "tokenizer_config.json",
                chat_template=[{"name": "tool_use", "template": "old"}],
            )
        (folder / "chat_template.jinja").write_text(default)
    template = ChatTemplate.of(Checkpoint(folder))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template
    for given in (None, TOOLS):
        assert template.render(MESSAGES, tools=given) == theirs(
            MESSAGES, tools=given, tokenize=False, add_generation_prompt=True
        )
    assert template.render(MESSAGES, tools=TOOLS) == "tools: 1"
    assert template.render(MESSAGES, tools=[]) == "defaultNone"
    named_template = ChatTemplate.given("tool_use", Checkpoint(folder))
    assert named_template.render(MESSAGES, tools=TOOLS) == "tools: 1"
    assert ChatTemplate.given("default", Checkpoint(folder)).source == default


def test_a_broken_template_for_tools_shows_when_it_is_loaded(folder: Path) -> None:
    named = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "{% if %}"}]
    edit_config(folder, "tokenizer_config.json", chat_template=named)
    with pytest.raises(ChatTemplateError, match="not valid Jinja"):
        ChatTemplate.of(Checkpoint(folder))


def test_a_template_that_is_given(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "my.jinja"
    file.write_text("mine{{ bos_token }}")
    for given in (str(file), "mine{{ bos_token }}"):
        assert ChatTemplate.given(given, Checkpoint(folder)).render(MESSAGES) == "mine<s>"
    with pytest.raises(ChatTemplateError, match=r"nothing\.jinja' cannot be read"):
        ChatTemplate.given("nothing.jinja", Checkpoint(folder))
    wrong: list[Any] = ["x\0y", "~nobody-here/x", "", 5]
    for given in wrong:
        with pytest.raises(ChatTemplateError, match=r"cannot be read|must be the name of a file"):
            ChatTemplate.given(given, Checkpoint(folder))


# ``LLM.chat`` answers what the template writes, as transformers would


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

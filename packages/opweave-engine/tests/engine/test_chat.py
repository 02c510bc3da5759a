"""Chat templates render what transformers renders, and fail readably."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from opweave_engine import ChatTemplate, ChatTemplateError, Checkpoint
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


def test_variables_of_any_name() -> None:
    template = ChatTemplate("{{ messages | length }}{{ name }}{{ context }}", "a test", {})
    assert template.render(MESSAGES, self=1, name=2, context=3) == f"{len(MESSAGES)}23"


def test_a_developer_is_the_system_where_nobody_knows_developers() -> None:
    said = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}", "", {}).render(said) == "system"
    assert ChatTemplate("{# developer #}{{ messages[0].role }}", "", {}).render(said) == "developer"
    assert said[0]["role"] == "developer"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SOURCE / name, tmp_path)
    return tmp_path


def configure(path: Path, **values: Any) -> None:
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_checkpoint_without_one(checkpoint: Path) -> None:
    assert ChatTemplate.of(Checkpoint(checkpoint)) is None


def test_where_checkpoints_keep_it(checkpoint: Path) -> None:
    def rendered() -> str:
        template = ChatTemplate.of(Checkpoint(checkpoint))
        return template.render(MESSAGES)

    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    configure(checkpoint, chat_template=named)
    assert rendered() == "d"
    configure(checkpoint, chat_template=named[:1])
    assert rendered() == "t"
    configure(checkpoint, chat_template="c{{ bos_token }}", bos_token={"content": "<b>"})
    assert rendered() == "c<b>"
    (checkpoint / "chat_template.jinja").write_text("f{{ eos_token }}")
    assert rendered() == "f</s>"
    (checkpoint / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja"):
        rendered()
    (checkpoint / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match="UTF-8"):
        rendered()


@pytest.mark.parametrize("kind", ["list", "object", "files", "both"])
def test_the_template_for_tools(checkpoint: Path, kind: str) -> None:
    default, tools = "default{{ tools }}", "tools: {{ tools | length }}"
    if kind == "list":
        named = [{"name": "default", "template": default}, {"name": "tool_use", "template": tools}]
        configure(checkpoint, chat_template=named)
    elif kind == "object":
        configure(checkpoint, chat_template={"default": default, "tool_use": tools})
    else:
        folder = checkpoint / "additional_chat_templates"
        folder.mkdir()
        (folder / "tool_use.jinja").write_text(tools)
        if kind == "both":  # a file is stronger than tokenizer_config.json
            configure(checkpoint, chat_template=[{"name": "tool_use", "template": "old"}])
        (checkpoint / "chat_template.jinja").write_text(default)
    template = ChatTemplate.of(Checkpoint(checkpoint))
    theirs = PreTrainedTokenizerFast.from_pretrained(checkpoint).apply_chat_template
    for given in (None, TOOLS):
        assert template.render(MESSAGES, tools=given) == theirs(
            MESSAGES, tools=given, tokenize=False, add_generation_prompt=True
        )
    assert template.render(MESSAGES, tools=TOOLS) == "tools: 1"
    assert template.render(MESSAGES, tools=[]) == "defaultNone"
    named_template = ChatTemplate.given("tool_use", Checkpoint(checkpoint))
    assert named_template.render(MESSAGES, tools=TOOLS) == "tools: 1"
    assert ChatTemplate.given("default", Checkpoint(checkpoint)).source == default


def test_a_broken_template_for_tools_shows_when_it_is_loaded(checkpoint: Path) -> None:
    named = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "{% if %}"}]
    configure(checkpoint, chat_template=named)
    with pytest.raises(ChatTemplateError, match="not valid Jinja"):
        ChatTemplate.of(Checkpoint(checkpoint))


def test_a_template_that_is_given(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "my.jinja"
    file.write_text("mine{{ bos_token }}")
    for given in (str(file), "mine{{ bos_token }}"):
        assert ChatTemplate.given(given, Checkpoint(checkpoint)).render(MESSAGES) == "mine<s>"
    with pytest.raises(ChatTemplateError, match=r"nothing\.jinja' cannot be read"):
        ChatTemplate.given("nothing.jinja", Checkpoint(checkpoint))
    wrong: list[Any] = ["x\0y", "~nobody-here/x", "", 5]
    for given in wrong:
        with pytest.raises(ChatTemplateError, match=r"cannot be read|must be the name of a file"):
            ChatTemplate.given(given, Checkpoint(checkpoint))

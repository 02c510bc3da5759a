"""Every field of the OpenAI and vLLM request schemas has its effect, or gets a 400."""

from __future__ import annotations

import importlib.util
import json
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel
from typing_extensions import is_typeddict

from opweave.config import EngineConfig
from opweave_engine import ChatTemplate
from opweave_engine.server import ServerConfig
from opweave_engine.server.protocol.base import RequestBody
from opweave_engine.server.protocol.chat import ChatRequest
from opweave_engine.server.protocol.completions import CompletionRequest
from opweave_engine.server.protocol.embeddings import EmbeddingConversation, EmbeddingRequest
from opweave_engine.server.protocol.responses import ResponsesRequest
from opweave_engine.server.protocol.scoring import RerankRequest, ScoreRequest
from opweave_engine.server.protocol.tokens import (
    DetokenizeRequest,
    ProcessRequest,
    TokenizeConversation,
    TokenizePrompt,
)
from opweave_engine.server.request_fields import ENDPOINTS, Row
from server.conftest import Running, running
from server.fake_engine import FakeEngine
from server.test_schema import Echo
from support import ROOT

DOCS = ROOT / "docs"
OPENAI: dict[str, list[Any]] = {
    "completions": [
        completion_create_params.CompletionCreateParamsStreaming,
        completion_create_params.CompletionCreateParamsNonStreaming,
    ],
    "chat": [
        chat_create_params.CompletionCreateParamsStreaming,
        chat_create_params.CompletionCreateParamsNonStreaming,
    ],
    "embeddings": [embedding_create_params.EmbeddingCreateParams],
    "responses": [
        response_create_params.ResponseCreateParamsStreaming,
        response_create_params.ResponseCreateParamsNonStreaming,
    ],
}
# From the pages on the OpenAI-compatible server and on sampling parameters of vLLM's documentation,
# of several versions.
_VLLM_SAMPLING = {
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "early_stopping",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
    "prompt_logprobs", "allowed_token_ids", "bad_words", "add_special_tokens", "response_format",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_decoding_backend", "guided_whitespace_pattern", "priority", "request_id",
    "logits_processors", "return_tokens_as_token_ids", "return_token_ids", "cache_salt",
    "kv_transfer_params", "vllm_xargs", "repetition_detection", "max_repetition_pattern_size",
    "min_repetition_pattern_size", "repetition_min_count", "truncation_side",
    "stream_options.continuous_usage_stats",
}  # fmt: skip
_VLLM_CONVERSATION = {
    "messages", "add_generation_prompt", "continue_final_message", "chat_template",
    "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs", "add_special_tokens",
}  # fmt: skip
VLLM: dict[str, set[str]] = {
    "completions": {*_VLLM_SAMPLING, "prompt_embeds"},
    "chat": {
        *_VLLM_SAMPLING, *_VLLM_CONVERSATION, "best_of", "echo", "documents", "include_reasoning",
        "reasoning_effort", "thinking_token_budget", "messages.content.video_url",
        "messages.content.audio_url", "messages.content.image_embeds",
    },
    "embeddings": {
        *_VLLM_CONVERSATION, "truncate_prompt_tokens", "truncation_side", "padding", "request_id",
        "priority", "cache_salt", "normalize", "use_activation", "embed_dtype", "endianness",
    },
    "rerank": {
        "query", "documents", "top_n", "truncate_prompt_tokens", "truncation_side", "request_id",
        "priority", "cache_salt", "mm_processor_kwargs", "activation", "use_activation", "user",
    },
    "score": {
        "text_1", "text_2", "data_1", "data_2", "queries", "documents", "items",
        "truncate_prompt_tokens", "truncation_side", "request_id", "priority", "cache_salt",
        "mm_processor_kwargs", "activation", "use_activation", "user",
    },
    "responses": {
        "logit_bias", "top_k", "skip_special_tokens", "request_id", "mm_processor_kwargs",
        "priority", "cache_salt", "enable_response_messages", "previous_input_messages",
        "repetition_penalty", "seed", "stop", "ignore_eos", "structured_outputs", "vllm_xargs",
        "kv_transfer_params", "include_stop_str_in_output", "presence_penalty",
        "frequency_penalty",
    },
    "tokenize": {*_VLLM_CONVERSATION, "prompt", "return_token_strs", "tools"},
    "detokenize": {"tokens"},
}  # fmt: skip
MODELS: dict[str, list[type[RequestBody]]] = {
    "completions": [CompletionRequest],
    "chat": [ChatRequest],
    "embeddings": [EmbeddingRequest, EmbeddingConversation],
    "rerank": [RerankRequest],
    "score": [ScoreRequest],
    "responses": [ResponsesRequest],
    "process": [ProcessRequest],
    "tokenize": [TokenizePrompt, TokenizeConversation],
    "detokenize": [DetokenizeRequest],
}
SERVED = [name for name, endpoint in ENDPOINTS.items() if endpoint.is_served]
TEMPLATE = ChatTemplate(
    "{{ messages | tojson }}{{ (tools or '') | tojson }}{{ mood }}{{ add_generation_prompt }}"
    "{{ (documents or '') | tojson }}{{ messages[-1].content }}"
    "{{ '<think>' if mood == 'pensive' else '' }}{% if false %}</think>{% endif %}",
    "a test",
    {},
)

Body = dict[str, Any]
USER: Body = {"messages": [{"role": "user", "content": "x"}]}
BASES: dict[str, Body] = {
    "completions": {"prompt": "Return", "max_tokens": 2},
    "chat": {**USER, "max_tokens": 2},
    "embeddings": {"input": "Return"},
    "rerank": {"query": "Return", "documents": ["Yield", "Return the"]},
    "score": {"text_1": "Return", "text_2": "Yield"},
    "responses": {"input": "Return", "max_output_tokens": 2},
    "process": {"data": 1},
    "tokenize": {"prompt": "Return"},
    "detokenize": {"tokens": [5]},
}
_STREAM: Body = {"stream": True, "stream_options": {"include_usage": True}}


def _json_schema(schema: Body) -> Body:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def _form(**options: Any) -> tuple[Body, Body]:
    """A request with structured_outputs, and one with another form."""
    return {"structured_outputs": options}, {"structured_outputs": {"choice": ["other"]}}


# A value with an effect; or what to send, and what to send without the field.
_SAMPLING_EFFECTS: dict[str, Any] = {
    "model": "another",
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "n": 2,
    "stop": ["y"],
    "seed": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "stop_token_ids": [7],
    "min_tokens": 1,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "allowed_token_ids": [5],
    "bad_words": ["y"],
    "truncate_prompt_tokens": 1,
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "request_id": "mine",
    "stream_options.continuous_usage_stats": True,
    "stream": True,
    "stream_options.include_usage": (_STREAM, {"stream": True}),
    "priority": 3,
    "cache_salt": "ann",
    "response_format.type": ({"response_format": {"type": "json_object"}}, {}),
    "response_format.schema": (
        {"response_format": {"type": "json_object", "schema": {"required": ["a"]}}},
        {"response_format": {"type": "json_object"}},
    ),
    "response_format.json_schema.schema": (_json_schema({}), _json_schema({"type": "null"})),
    "structured_outputs.json": _form(json={}),
    "structured_outputs.json_object": _form(json_object=True),
    "structured_outputs.regex": _form(regex="a"),
    "structured_outputs.choice": _form(choice=["a"]),
    "structured_outputs.grammar": _form(grammar="start: X"),
    "structured_outputs.disable_any_whitespace": _form(json={}, disable_any_whitespace=True),
    "structured_outputs.disable_additional_properties": _form(
        json={}, disable_additional_properties=True
    ),
    "structured_outputs.whitespace_pattern": _form(json={}, whitespace_pattern=" "),
    "guided_json": {"type": "null"},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "start: X",
    "guided_whitespace_pattern": (
        {"guided_json": {}, "guided_whitespace_pattern": " "},
        {"guided_json": {}},
    ),
}


def _message(**fields: Any) -> Body:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


def _part(**fields: Any) -> Body:
    return _message(content=[{"type": "text", "text": "x", **fields}])


_CONVERSATION_EFFECTS: dict[str, Any] = {
    "messages.role": (_message(role="system"), USER),
    "messages.content": (_message(content="y"), USER),
    "messages.content.type": (_part(type="image_url"), _part()),
    "messages.content.text": (_part(text="y"), _part()),
    "messages.name": (_message(name="me"), USER),
    "messages.tool_call_id": (_message(tool_call_id="a"), USER),
    "messages.content.refusal": (_part(type="refusal", refusal="y"), _part()),
    "messages.content.thinking": (_part(type="thinking", thinking="y"), _part()),
    "messages.tool_calls": (_message(tool_calls=[{"function": {"name": "f"}}]), USER),
    "continue_final_message": ({**USER, "continue_final_message": True}, USER),
    "chat_template": ({**USER, "chat_template": "{{ mood }}y"}, USER),
    "documents": ({**USER, "documents": [{"text": "y"}]}, USER),
    "add_generation_prompt": ({**USER, "add_generation_prompt": False}, USER),
    "chat_template_kwargs": ({**USER, "chat_template_kwargs": {"mood": "merry"}}, USER),
    "tools": ({**USER, "tools": [{"type": "function"}]}, USER),
}
_FLAT_TOOLS: Any = [{"type": "function", "name": "f"}]
_PENSIVE: Body = {"chat_template_kwargs": {"mood": "pensive"}}
_TOOLS: Any = [{"type": "function", "function": {"name": "f"}}]
EFFECTS: dict[str, dict[str, Any]] = {
    "completions": {
        **_SAMPLING_EFFECTS,
        "prompt": "Yield",
        "echo": True,
        "logprobs": 1,
        "best_of": 2,
        "add_special_tokens": False,
        "return_tokens_as_token_ids": (
            {"logprobs": 1, "return_tokens_as_token_ids": True},
            {"logprobs": 1},
        ),
    },
    "chat": {
        **_SAMPLING_EFFECTS,
        **_CONVERSATION_EFFECTS,
        "max_completion_tokens": ({"max_completion_tokens": 3, "max_tokens": None}, {}),
        "logprobs": True,
        "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True}),
        "add_special_tokens": True,
        "return_tokens_as_token_ids": (
            {"logprobs": True, "return_tokens_as_token_ids": True},
            {"logprobs": True},
        ),
        "parallel_tool_calls": (
            {"tools": _TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": _TOOLS, "tool_choice": "required"},
        ),
        "include_reasoning": ({**_PENSIVE, "include_reasoning": False}, _PENSIVE),
        "tool_choice": ({"tools": _TOOLS, "tool_choice": "required"}, {"tools": _TOOLS}),
    },
    "embeddings": {
        "model": "another",
        "input": "Return the",
        **_CONVERSATION_EFFECTS,
        "add_generation_prompt": ({**USER, "add_generation_prompt": True}, USER),
        "encoding_format": "base64",
        "dimensions": 2,
        "normalize": True,
        "use_activation": True,
        "add_special_tokens": False,
        "truncate_prompt_tokens": 1,
        "truncation_side": (
            {"input": "Return the", "truncate_prompt_tokens": 2, "truncation_side": "left"},
            {"input": "Return the", "truncate_prompt_tokens": 2},
        ),
    },
    "rerank": {
        "model": "another",
        "query": "Return the",
        "documents": ["Yield"],
        "documents.text": ({"documents": [{"text": "a b c"}]}, {"documents": [{"text": "a"}]}),
        "top_n": 1,
        "return_documents": False,
        "truncate_prompt_tokens": 2,
        "truncation_side": (
            {"query": "Return the", "truncate_prompt_tokens": 4, "truncation_side": "left"},
            {"query": "Return the", "truncate_prompt_tokens": 4},
        ),
    },
    "score": {
        "model": "another",
        "text_1": "Return the",
        "text_2": ["Yield", "Return the"],
        "truncate_prompt_tokens": 1,
        "truncation_side": (
            {"text_2": "Return the", "truncate_prompt_tokens": 4, "truncation_side": "left"},
            {"text_2": "Return the", "truncate_prompt_tokens": 4},
        ),
    },
    "responses": {
        "model": "another",
        "input": "Yield",
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "cache_salt": "ann",
        "max_output_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.5,
        "stream": True,
        "text.format": ({"text": {"format": {"type": "json_object"}}}, {}),
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": ({"tools": _FLAT_TOOLS, "tool_choice": "required"}, {"tools": _FLAT_TOOLS}),
        "parallel_tool_calls": (
            {"tools": _FLAT_TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": _FLAT_TOOLS, "tool_choice": "required"},
        ),
    },
    "process": {"model": "another", "data": 2, "priority": 3, "cache_salt": "ann"},
    "tokenize": {
        **_CONVERSATION_EFFECTS,
        "model": "another",
        "prompt": "Yield",
        "add_special_tokens": False,
        "return_token_strs": True,
    },
    "detokenize": {"model": "another", "tokens": [6]},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    config = ServerConfig(trust_request_chat_template=True)
    with running(None, config, TEMPLATE, Echo(EngineConfig())) as shared:
        yield shared


@pytest.fixture(scope="module")
def embedder() -> Iterator[Running]:
    config = ServerConfig(trust_request_chat_template=True)
    with running(FakeEngine(embeds=True), config, TEMPLATE) as shared:
        yield shared


def fields(kind: Any, prefix: str = "", seen: tuple[Any, ...] = ()) -> Iterator[str]:
    """The paths of all fields of a typed dict, through lists and unions."""
    if not is_typeddict(kind):
        for each in typing.get_args(kind):
            yield from fields(each, prefix, seen)
    elif kind not in seen:
        for name, type_ in typing.get_type_hints(kind).items():
            yield prefix + name
            yield from fields(type_, f"{prefix}{name}.", (*seen, kind))


def is_covered(path: str, rows: Mapping[str, Row]) -> bool:
    """Whether the table decides on a field: it has a row, or the field that contains it decides."""
    if path in rows:
        return True
    while path:
        path = path.rpartition(".")[0]
        if path in rows:
            return rows[path].is_open or rows[path].status == "refused"
    return False


@pytest.mark.parametrize("endpoint", OPENAI)
def test_the_table_has_every_field_of_the_openai_client(endpoint: str) -> None:
    rows = ENDPOINTS[endpoint].table.rows
    found = {path for kind in OPENAI[endpoint] for path in fields(kind)}
    assert len(found) >= len(OPENAI[endpoint][0].__annotations__)
    assert not sorted(path for path in found if not is_covered(path, rows))


def test_the_walk_goes_through_lists_and_unions() -> None:
    found = set(fields(OPENAI["chat"][0]))
    assert {"stream", "messages.content.image_url.url", "response_format.json_schema.name"} <= found


@pytest.mark.parametrize("endpoint", VLLM)
def test_the_table_has_every_field_of_vllm(endpoint: str) -> None:
    assert VLLM[endpoint] <= ENDPOINTS[endpoint].table.rows.keys()


def declared(kind: Any, prefix: str = "") -> Iterator[str]:
    """The paths of the fields that a model of a request declares."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, info in kind.model_fields.items():
            yield prefix + (info.alias or name)
            yield from declared(info.annotation, f"{prefix}{info.alias or name}.")
    else:
        for each in typing.get_args(kind):
            yield from declared(each, prefix)


@pytest.mark.parametrize("endpoint", SERVED)
def test_supported_fields_are_those_of_the_models(endpoint: str) -> None:
    rows = ENDPOINTS[endpoint].table.rows
    found = {path for model in MODELS[endpoint] for path in declared(model)}
    assert {path for path in found if path not in rows} == set()
    supported = {path for path, row in rows.items() if row.status == "supported"}
    is_open = {path for path in supported if path.startswith("messages.")}
    assert supported - is_open <= found


def test_every_supported_field_has_an_example_of_its_effect() -> None:
    for endpoint in SERVED:
        rows = ENDPOINTS[endpoint].table.rows
        containers = {path.rpartition(".")[0] for path in rows}
        supported = {path for path, row in rows.items() if row.status == "supported"}
        assert supported - containers <= EFFECTS[endpoint].keys() <= supported, endpoint


def cases(*statuses: str) -> list[Any]:
    return [
        pytest.param(endpoint, row, id=f"{endpoint}-{row.path}")
        for endpoint in SERVED
        for row in ENDPOINTS[endpoint].rows
        if row.status in statuses
    ]


class Client:
    """Sends requests to one endpoint, and returns all that they change."""

    def __init__(self, endpoint: str, server: Running, embedder: Running) -> None:
        self.endpoint = endpoint
        self.server = embedder if endpoint in ("embeddings", "rerank", "score") else server

    def send(self, body: Body) -> httpx.Response:
        return self.server.post(ENDPOINTS[self.endpoint].path, self.complete(body))

    def complete(self, body: Body) -> Body:
        base = dict(BASES[self.endpoint])
        if self.endpoint in ("tokenize", "embeddings") and "messages" in body:
            base.clear()
        return {**base, **body}

    def outcome(self, body: Body) -> Any:
        """The response to the client and the request to the engine."""
        engine = self.server.engine
        engine.calls.clear()
        answer = self.send(body)
        text = re.sub("[0-9a-f]{32}", "", answer.text)
        text = re.sub('"(created|created_at)": ?[0-9]+', r'"\1":0', text)
        parts = [
            json.loads(line.removeprefix("data: "))
            for line in text.splitlines()
            if line not in ("", "data: [DONE]") and not line.startswith("event: ")
        ]
        asked = [
            (list(call.prompt), call.params, call.priority, call.cache_salt)
            for call in engine.calls
        ]
        return answer.status_code, parts, asked


def with_field(path: str, value: object) -> tuple[Body, Body]:
    """A request with the field, and the same one without it."""
    if path.startswith("stream_options."):
        name = path.partition(".")[2]
        return (
            {"stream": True, "stream_options": {name: value}},
            {"stream": True, "stream_options": {}},
        )
    for parent in ("response_format.json_schema", "structured_outputs"):
        if path.startswith(f"{parent}."):
            name = path.removeprefix(f"{parent}.")
            if parent == "structured_outputs":
                form = {"choice": ["a"]}
                return {parent: {**form, name: value}}, {parent: form}
            schema: Body = {"type": "json_schema", "json_schema": {"schema": {}}}
            with_ = {**schema, "json_schema": {"schema": {}, name: value}}
            return {"response_format": with_}, {"response_format": schema}
    if path.startswith("response_format."):
        form = {"type": "text"}
        name = path.partition(".")[2]
        return {"response_format": {**form, name: value}}, {"response_format": form}
    if path.startswith("messages.content."):
        return _part(**{path.rpartition(".")[2]: value}), _part()
    if path.startswith("messages."):
        return _message(**{path.partition(".")[2]: value}), USER
    if path.startswith("text."):
        return {"text": {path.removeprefix("text."): value}}, {}
    assert "." not in path
    return {path: value}, {}


@pytest.mark.parametrize(("endpoint", "row"), cases("supported"))
def test_supported_fields_have_an_effect(
    endpoint: str, row: Row, server: Running, embedder: Running
) -> None:
    if (example := EFFECTS[endpoint].get(row.path)) is None:
        return  # its effect is that of the fields in it
    with_, without = example if isinstance(example, tuple) else with_field(row.path, example)
    client = Client(endpoint, server, embedder)
    assert client.outcome(with_) != client.outcome(without)
    assert "x-opweave-ignored" not in client.send(with_).headers


@pytest.mark.parametrize("endpoint", ["completions", "chat", "responses", "process"])
@pytest.mark.parametrize("salt", ["", 5])
def test_a_cache_salt_is_a_text_that_is_not_empty(
    endpoint: str, salt: object, server: Running, embedder: Running
) -> None:
    answer = Client(endpoint, server, embedder).send({"cache_salt": salt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


@pytest.mark.parametrize(("endpoint", "row"), cases("refused"))
def test_alternatives_to_a_refused_field_are_supported(endpoint: str, row: Row) -> None:
    paths = {each.path: name for name, each in ENDPOINTS.items()}
    named = re.search(r" of (/[\w/]+)|[Uu]se (/[\w/]+)", row.note)
    elsewhere = named and (named[1] or named[2])
    rows = ENDPOINTS[paths[elsewhere] if elsewhere else endpoint].table.rows
    for field in re.findall(r"\b(?:[Uu]se|in) ([a-z]+(?:[_.][a-z_]+)+|n|logprobs)\b", row.note):
        assert rows[field].status == "supported"
    if elsewhere and not named[1]:  # "Use /v1/...": that endpoint has the field
        assert rows[row.path].status == "supported"


@pytest.mark.parametrize(("endpoint", "row"), cases("refused"))
def test_refused_fields_are_errors_unless_they_ask_for_nothing(
    endpoint: str, row: Row, server: Running, embedder: Running
) -> None:
    client = Client(endpoint, server, embedder)
    for value in ("odd", 17, True, False, ["odd"], {"odd": 1}):
        if row.is_off(value):
            continue
        answer = client.send(with_field(row.path, value)[0])
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported", row.path.partition(".")[0])
        assert row.path in error["message"]
        assert row.note in error["message"]
    for value in (None, *row.off):
        with_, without = with_field(row.path, value)
        found = client.outcome(with_)
        assert found == client.outcome(without)
        assert found[0] == 200
        assert "x-opweave-ignored" not in client.send(with_).headers


@pytest.mark.parametrize(("endpoint", "row"), cases("harmless"))
def test_harmless_fields_change_nothing(
    endpoint: str, row: Row, server: Running, embedder: Running
) -> None:
    client = Client(endpoint, server, embedder)
    with_, without = with_field(row.path, "odd")
    found = client.outcome(with_)
    assert found == client.outcome(without)
    assert found[0] == 200
    assert "x-opweave-ignored" not in client.send(with_).headers


@pytest.mark.parametrize(
    ("endpoint", "body", "ignored"),
    [
        ("completions", {"odd": 1, **_STREAM}, "odd"),
        ("chat", {"stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
        ("chat", {"response_format": {"type": "text", "odd": 1}}, "response_format.odd"),
        ("chat", _part(odd=1, also=2), "messages.content.also, messages.content.odd"),
        ("tokenize", _part(odd=1), "messages.content.odd"),
        ("embeddings", {"odd": {"model": 1}}, "odd"),
        ("rerank", {"documents": [{"text": "x", "odd": 1}], "also": 2}, "also, documents.odd"),
        ("score", {"odd": None}, "odd"),
        ("detokenize", {"odd": None}, "odd"),
        ("process", {"odd": None}, "odd"),
    ],
)
def test_unknown_fields_are_named_at_every_level(
    endpoint: str, body: Body, ignored: str, server: Running, embedder: Running
) -> None:
    answer = Client(endpoint, server, embedder).send(body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-opweave-ignored"] == ignored


def test_the_documentation_shows_the_table() -> None:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = (DOCS / "reference" / "request-fields.md").read_text(encoding="utf-8")
    sections = hooks.on_page_markdown(page).split("\n## ")[1:]
    assert [section.partition("\n")[0] for section in sections] == [
        endpoint.path for endpoint in ENDPOINTS.values()
    ]
    for section, endpoint in zip(sections, ENDPOINTS.values(), strict=True):
        lines = [line for line in section.splitlines() if line.startswith("| `")]
        assert len(lines) == len(endpoint.rows)
        for line, row in zip(lines, endpoint.rows, strict=True):
            assert line.startswith(f"| `{row.path}` | {row.status}")
            assert line.endswith(f"| {row.note} |")

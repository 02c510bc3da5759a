"""Every field of the OpenAI and vLLM request schemas has its effect, or gets a 400."""

from __future__ import annotations

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
from typing_extensions import is_typeddict

from opweave.config import EngineConfig
from opweave_engine import ChatTemplate
from opweave_engine.server import ServerConfig
from opweave_engine.server.app import request_fields
from opweave_engine.server.protocol.base import FieldRow
from server.conftest import Running, running
from server.fake_engine import FakeEngine
from server.test_schema import Echo
from support import ROOT

DOCS = ROOT / "docs"
OPENAI: dict[str, list[Any]] = {
    "completions": [completion_create_params.CompletionCreateParamsStreaming,
                    completion_create_params.CompletionCreateParamsNonStreaming],
    "chat": [chat_create_params.CompletionCreateParamsStreaming,
             chat_create_params.CompletionCreateParamsNonStreaming],
    "embeddings": [embedding_create_params.EmbeddingCreateParams],
    "responses": [response_create_params.ResponseCreateParamsStreaming,
                  response_create_params.ResponseCreateParamsNonStreaming],
}  # fmt: skip
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
PATHS = {
    "completions": "/v1/completions", "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings", "rerank": "/v1/rerank", "score": "/v1/score",
    "responses": "/v1/responses", "process": "/v1/process", "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}  # fmt: skip
FIELDS = {name: request_fields()[path] for name, path in PATHS.items()}
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


def _json_schema(schema: Body, **options: Any) -> Body:
    json_schema = {"schema": schema, **options}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


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
    "tokenize": {**_CONVERSATION_EFFECTS, "model": "another", "prompt": "Yield",
                 "add_special_tokens": False, "return_token_strs": True},
    "detokenize": {"model": "another", "tokens": [6]},
}  # fmt: skip


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


OPEN = {"messages"}  # objects that may have fields of any name, and have a model


def is_covered(path: str, rows: Mapping[str, FieldRow]) -> bool:
    """Whether the models decide on a field: it has a row, or the field that contains it decides."""
    if path in rows:
        return True
    while path := path.rpartition(".")[0]:
        if path in rows:
            return path in OPEN or rows[path].parts is None
    return False


@pytest.mark.parametrize("endpoint", OPENAI)
def test_the_models_have_every_field_of_the_openai_client(endpoint: str) -> None:
    paths = {path for kind in OPENAI[endpoint] for path in fields(kind)}
    assert len(paths) >= len(OPENAI[endpoint][0].__annotations__)
    assert endpoint != "chat" or "messages.content.image_url.url" in paths
    assert not sorted(path for path in paths if not is_covered(path, FIELDS[endpoint]))


@pytest.mark.parametrize("endpoint", VLLM)
def test_the_models_have_every_field_of_vllm(endpoint: str) -> None:
    assert VLLM[endpoint] <= FIELDS[endpoint].keys()


@pytest.mark.parametrize("endpoint", FIELDS)
def test_every_supported_field_has_an_example_of_its_effect(endpoint: str) -> None:
    containers = {path.rpartition(".")[0] for path in FIELDS[endpoint]}
    supported = set(with_status(endpoint, "supported"))
    assert supported - containers <= EFFECTS[endpoint].keys() <= supported


def with_status(endpoint: str, status: str) -> dict[str, FieldRow]:
    return {path: row for path, row in FIELDS[endpoint].items() if row.status == status}


def cases(status: str) -> list[Any]:
    return [
        pytest.param(endpoint, path, id=f"{endpoint}-{path}")
        for endpoint in FIELDS
        for path in with_status(endpoint, status)
        if status != "supported" or path in EFFECTS[endpoint]
    ]


class Client:
    """Sends requests to one endpoint, and returns all that they change."""

    def __init__(self, endpoint: str, server: Running, embedder: Running) -> None:
        self.endpoint = endpoint
        self.server = embedder if endpoint in ("embeddings", "rerank", "score") else server

    def send(self, body: Body) -> httpx.Response:
        return self.server.post(PATHS[self.endpoint], self.complete(body))

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


def with_fields(parent: str, values: Body) -> tuple[Body, Body]:
    """A request with fields of the object *parent*, and the same one without them."""
    if parent == "stream_options":
        return {"stream": True, parent: values}, {"stream": True, parent: {}}
    if parent == "response_format.json_schema":
        return _json_schema({}, **values), _json_schema({})
    if parent == "structured_outputs":
        return {parent: {"choice": ["a"], **values}}, {parent: {"choice": ["a"]}}
    if parent == "response_format":
        return {parent: {"type": "text", **values}}, {parent: {"type": "text"}}
    if parent == "messages.content":
        return _part(**values), _part()
    if parent == "messages":
        return _message(**values), USER
    return ({parent: values} if parent else values), {}


def with_field(path: str, value: object) -> tuple[Body, Body]:
    parent, _, name = path.rpartition(".")
    return with_fields(parent, {name: value})


def groups(values: Mapping[str, object]) -> Iterator[tuple[Body, Body]]:
    """For each object, a request with its fields among *values*, and one without them."""
    parents: dict[str, Body] = {}
    for path, value in values.items():
        parent, _, name = path.rpartition(".")
        parents.setdefault(parent, {})[name] = value
    return (with_fields(parent, fields_of) for parent, fields_of in parents.items())


@pytest.mark.parametrize(("endpoint", "path"), cases("supported"))
def test_supported_fields_have_an_effect(
    endpoint: str, path: str, server: Running, embedder: Running
) -> None:
    example = EFFECTS[endpoint][path]
    with_, without = example if isinstance(example, tuple) else with_field(path, example)
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


@pytest.mark.parametrize(("endpoint", "path"), cases("refused"))
def test_refused_fields_are_errors(
    endpoint: str, path: str, server: Running, embedder: Running
) -> None:
    row = FIELDS[endpoint][path]
    value = next(v for v in (True, "odd") if not row.is_off(v))
    answer = Client(endpoint, server, embedder).send(with_field(path, value)[0])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported", path.partition(".")[0])
    assert path in error["message"]
    assert row.note in error["message"]


@pytest.mark.parametrize("value", ["odd", 17, True, False, ["odd"], {"odd": 1}])
def test_off_values_are_compared_with_their_types(value: object) -> None:
    for off in (1, 0, False, [], {}, "low", -1):
        assert not FieldRow("refused", "", (off,)).is_off(value) or (value, off) == (False, False)


@pytest.mark.parametrize(("endpoint", "path"), cases("refused"))
def test_alternatives_to_a_refused_field_are_supported(endpoint: str, path: str) -> None:
    note, names = FIELDS[endpoint][path].note, {path: name for name, path in PATHS.items()}
    named = re.search(r" of (/[\w/]+)|[Uu]se (/[\w/]+)", note)
    elsewhere = named and (named[1] or named[2])
    rows = FIELDS[names[elsewhere] if elsewhere else endpoint]
    for field in re.findall(r"\b(?:[Uu]se|in) ([a-z]+(?:[_.][a-z_]+)+|n|logprobs)\b", note):
        assert rows[field].status == "supported"
    if elsewhere and not named[1]:  # "Use /v1/...": that endpoint has the field
        assert rows[path].status == "supported"


@pytest.mark.parametrize("endpoint", FIELDS)
def test_harmless_and_disabled_fields_change_nothing(
    endpoint: str, server: Running, embedder: Running
) -> None:
    client, refused = Client(endpoint, server, embedder), with_status(endpoint, "refused")
    unset = [
        dict.fromkeys(with_status(endpoint, "harmless"), "odd"),
        dict.fromkeys(refused),
        *({p: row.off[i] for p, row in refused.items() if i < len(row.off)} for i in range(2)),
    ]
    for with_, without in (pair for values in unset for pair in groups(values)):
        outcome = client.outcome(with_)
        assert outcome == client.outcome(without)
        assert outcome[0] == 200
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
    text = (DOCS / "reference" / "request-fields.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)", text, re.M) == [
        path for path in request_fields() if path not in ("/rerank", "/score")
    ]
    assert "| `temperature` | supported | From 0, which is greedy, to 2. |" in text
    assert "| `length_penalty` | refused, unless `1` | There is no beam search" in text
    assert len(re.findall(r"^\| `", text, re.M)) == sum(map(len, FIELDS.values()))

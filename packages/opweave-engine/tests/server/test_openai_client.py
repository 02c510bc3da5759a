"""OpenAI's official client: the responses of every endpoint, with every option."""

from __future__ import annotations

import itertools
import re
from typing import Any

import openai
import pytest
from openai import OpenAI

from opweave_engine import SamplingParams
from server.conftest import Running, Start, texts_of
from server.fake_engine import FakeEngine, tokens

MODEL = "tiny-pydoc"


@pytest.fixture
def client(server: Running) -> OpenAI:
    return server.openai()


def expected(server: Running, prompt: str | list[int], count: int, index: int = 0) -> list[int]:
    """The tokens that the engine answers with."""
    ids = server.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return list(itertools.islice(tokens(ids, None, index), count))


def expected_text(server: Running, prompt: str | list[int], count: int, index: int = 0) -> str:
    return server.engine.tokenizer.decode(expected(server, prompt, count, index))


def test_completion(client: OpenAI, server: Running) -> None:
    answer = client.completions.create(model=MODEL, prompt="Return the", max_tokens=7)
    assert answer.object == "text_completion"
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", answer.id)
    assert answer.model == MODEL
    assert answer.created >= server.state.created
    (choice,) = answer.choices
    assert choice.text == expected_text(server, "Return the", 7)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    prompt_tokens = len(server.engine.tokenizer.encode("Return the"))
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == prompt_tokens + 7
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_all_forms_of_prompts(client: OpenAI, server: Running, stream: bool) -> None:
    ids = server.engine.tokenizer.encode("dog")
    for prompt, parts in [
        ("dog", ["dog"]),
        (["dog", "Return the"], ["dog", "Return the"]),
        (ids, [ids]),
        ([ids, [5, 6, 7]], [ids, [5, 6, 7]]),
    ]:
        answers: Any = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=4, n=2, stream=stream
        )
        wanted = [expected_text(server, part, 4, i) for part in parts for i in range(2)]
        assert texts_of(answers, stream=stream) == wanted


def test_completion_stream(client: OpenAI, server: Running) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="Return the", max_tokens=12, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert chunks[0].object == "text_completion"
    *pieces, last = chunks
    assert "".join(p.choices[0].text for p in pieces) == expected_text(server, "Return the", 12)
    assert [p.choices[0].finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(piece.usage is None for piece in pieces)
    assert last.choices == []
    assert last.usage.completion_tokens == 12


def test_parts_of_characters_are_told_apart_by_their_bytes(client: OpenAI) -> None:
    text = "\u6f22\u5b57 \ufffd"
    answer = client.completions.create(
        model=MODEL, prompt=text, max_tokens=1, logprobs=3, echo=True
    )
    found = answer.choices[0].logprobs
    names = (found.tokens or [])[1:-1]  # the first one has no values, the last is the answer's
    parts = [name.removeprefix("bytes:") for name in names if name.startswith("bytes:")]
    assert len(parts) > 2
    written = b"".join(
        bytes.fromhex(name[6:].replace("\\x", " ")) if name.startswith("bytes:") else name.encode()
        for name in names
    )
    assert text.encode().endswith(written)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_each_answer_of_a_stream_ends_once(client: OpenAI, server: Running, kind: str) -> None:
    chat: Any = {"messages": [{"role": "user", "content": "Hello"}]}
    create: Any = client.completions.create
    options: Any = {"prompt": [5, 6]}
    if kind == "chat":
        create, options = client.chat.completions.create, chat
        create(model=MODEL, max_tokens=1, **chat)
    prompt = options.get("prompt") or list(server.engine.calls[-1].prompt)
    stop = expected(server, prompt, 3, index=1)[-1]
    chunks = list(
        create(
            model=MODEL, n=2, max_tokens=9, stream=True, extra_body={"stop_token_ids": [stop]},
            **options,
        )
    )  # fmt: skip
    choices = [chunk.choices[0] for chunk in chunks]
    ends = [(c.index, c.finish_reason) for c in choices if c.finish_reason is not None]
    assert ends == [(1, "stop"), (0, "length")]
    assert choices[-1].index == 0


def test_rating_a_text_generates_nothing(client: OpenAI, server: Running) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Return the list", max_tokens=0, logprobs=1, echo=True
    )
    (choice,) = answer.choices
    assert choice.text == "Return the list"
    ids = server.engine.tokenizer.encode("Return the list")
    assert len(choice.logprobs.token_logprobs) == len(ids)
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_that_nobody_asked_for_ends_nothing(server: Running, stream: bool) -> None:
    (token,) = expected(server, "Return the list", 1)
    answers: Any = server.openai().completions.create(
        model=MODEL, prompt="Return the list", max_tokens=0, stream=stream,
        extra_body={"stop_token_ids": [token]},
    )  # fmt: skip
    (choice,) = [answer.choices[0] for answer in (answers if stream else [answers])]
    assert (choice.finish_reason, choice.stop_reason) == ("length", None)


def test_chat(client: OpenAI, server: Running) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=6
    )
    assert answer.object == "chat.completion"
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer.id)
    (choice,) = answer.choices
    prompt = server.engine.calls[-1].prompt
    text = "<s>[user]Hello[assistant]"
    assert prompt == server.engine.tokenizer.encode(text, add_special_tokens=False)
    assert choice.message.role == "assistant"
    assert choice.message.content == expected_text(server, list(prompt), 6)
    assert choice.finish_reason == "length"
    assert answer.usage.total_tokens == len(prompt) + 6


def test_chat_stream(client: OpenAI, server: Running) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], n=2,
            max_completion_tokens=9, stream=True, stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    *pieces, last = chunks
    prompt = list(server.engine.calls[-1].prompt)
    for index in range(2):
        deltas = [p.choices[0] for p in pieces if p.choices[0].index == index]
        assert deltas[0].delta.role == "assistant"
        assert all(each.delta.role is None for each in deltas[1:])
        text = "".join(each.delta.content or "" for each in deltas)
        assert text == expected_text(server, prompt, 9, index)
        reasons = [each.finish_reason for each in deltas]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
        assert deltas[-1].delta.content is None
    assert last.choices == []
    assert last.usage.completion_tokens == 18


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: OpenAI, server: Running, stream: bool) -> None:
    answers: Any = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=5, logprobs=True,
        top_logprobs=2, stream=stream,
    )  # fmt: skip
    found = [
        token
        for answer in (answers if stream else [answers])
        for choice in answer.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    ids = expected(server, list(server.engine.calls[-1].prompt), 5)
    assert [t.token for t in found] == [server.engine.tokenizer.decode([i]) for i in ids]
    for token in found:
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token
        assert len(token.top_logprobs) == 2
        assert token.token in [top.token for top in token.top_logprobs]
        assert token.top_logprobs[0].logprob > token.top_logprobs[1].logprob


def test_chat_messages_of_all_kinds(client: OpenAI, server: Running) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "2"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=1, tools=tools, tool_choice="auto",
        extra_body={"chat_template_kwargs": {"mood": "(merry)"}, "add_generation_prompt": False},
    )  # fmt: skip
    text = server.engine.tokenizer.decode(server.engine.calls[-1].prompt, skip_special_tokens=False)
    assert text == (
        "<s>[system]Be brief.[user]One\n2[assistant][tool]3[tools]"
        '[{"type": "function", "function": {"name": "f", "parameters": {}}}](merry)'
    )


OPTIONS: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 7, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "logit_bias": {"5": 10, "7": -100}, "stop": ["zzz", "yyy"],
}  # fmt: skip
EXTENSIONS: dict[str, Any] = {
    "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [9], "min_tokens": 2,
    "ignore_eos": True, "skip_special_tokens": False,
}  # fmt: skip


def test_nulls_are_defaults(client: OpenAI, server: Running) -> None:
    names = [*OPTIONS, *EXTENSIONS, "stream", "stream_options", "user", "echo", "max_tokens"]
    nothing: Any = dict.fromkeys(names)
    server.post("/v1/completions", {"prompt": "x", **nothing}).raise_for_status()
    assert server.engine.calls[-1].params == SamplingParams()


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(client: OpenAI, server: Running, stream: bool) -> None:
    full = expected_text(server, "Return the", 40)
    stop = full[20:26]
    answers: Any = client.completions.create(
        model=MODEL, prompt="Return the", max_tokens=40, stop=stop, stream=stream
    )
    choices = [answer.choices[0] for answer in (answers if stream else [answers])]
    assert "".join(choice.text for choice in choices) == full[: full.index(stop)]
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].model_extra["stop_reason"] == stop


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    card = client.models.retrieve(MODEL)
    assert (card.object, card.owned_by) == ("model", "opweave")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-nothing")


def test_served_model_names(start: Start) -> None:
    from opweave_engine.server import ServerConfig

    client = start(config=ServerConfig(served_model_names=("org/a", "b"))).openai()
    assert [model.id for model in client.models.list()] == ["org/a", "b"]
    assert client.models.retrieve("org/a").id == "org/a"
    answer = client.completions.create(model="b", prompt="x", max_tokens=1)
    assert answer.model == "org/a"
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model=MODEL, prompt="x")
    assert error.value.code == "model_not_found"
    assert "org/a, b" in error.value.message


@pytest.mark.parametrize("encoding", ["float", "base64", None])  # None is the client's own choice
def test_embeddings(start: Start, encoding: Any) -> None:
    running = start(FakeEngine(embeds=True))
    form = {} if encoding is None else {"encoding_format": encoding}
    answer = running.openai().embeddings.create(
        model=MODEL, input=["Return", "Return the list"], dimensions=3, **form
    )
    counts = [len(running.engine.tokenizer.encode(text)) for text in ("Return", "Return the list")]
    assert [each.index for each in answer.data] == [0, 1]
    assert answer.usage.prompt_tokens == sum(counts)
    for each, count in zip(answer.data, counts, strict=True):
        if encoding == "base64":
            assert isinstance(each.embedding, str)
        else:
            assert each.embedding == [float(count), 0.5, -0.25]
    with pytest.raises(openai.BadRequestError, match="3 numbers"):
        running.openai().embeddings.create(model=MODEL, input="x", dimensions=2)


def test_tokens_there_and_back(server: Running) -> None:
    answer = server.post("/tokenize", {"prompt": "Return the", "return_token_strs": True}).json()
    tokenizer = server.engine.tokenizer
    assert answer["tokens"] == tokenizer.encode("Return the")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 256
    assert answer["token_strs"] == [tokenizer.token(i) for i in answer["tokens"]]
    back = server.post("/detokenize", {"tokens": answer["tokens"]}).json()
    assert back["prompt"] == "<s>Return the"
    special = server.post("/detokenize", {"tokens": [0, 1, 2]}).json()
    assert special["prompt"] == "<s></s><pad>"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}
    answer = server.post("/tokenize", chat).json()
    assert answer["tokens"] == tokenizer.encode("<s>[user]Hi", add_special_tokens=False)
    bare = server.post("/tokenize", {"prompt": "Return", "add_special_tokens": False}).json()
    assert bare["tokens"] == tokenizer.encode("Return", add_special_tokens=False)


def test_other_endpoints(server: Running) -> None:
    import opweave

    assert server.get("/version").json() == {"version": opweave.__version__}
    for path in ("/health", "/ping"):
        answer = server.get(path)
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    ops = {each["op"]: each for each in server.get("/v1/ops").json()["data"]}
    assert ops["rms_norm"]["preferred"] in [e["provider"] for e in ops["rms_norm"]["priority"]]
    assert ops["linear"]["implementations"]
    assert server.get("/v1/plugins").json()["object"] == "list"

"""Options for what a response holds: token ids, log-probabilities, usage; and failures of parts."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from opweave.config import EngineConfig
from opweave_engine import LLM, AsyncEngine, SamplingParams
from server.conftest import Running, events, running
from server.fake_engine import CHECKPOINT

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Return the", "max_tokens": 8, "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": "Return the"}], "max_tokens": 8,
           "temperature": 0},
}  # fmt: skip
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture
def change_logits(real: Running) -> Iterator[Callable[[Callable[[Tensor], object]], None]]:
    """Let a function change the logits that the model returns."""
    core: Any = real.engine
    model = core._core.executor.worker.runner.model
    compute = model.compute_logits

    def change(how: Callable[[Tensor], object]) -> None:
        def changed(hidden: Tensor) -> Tensor:
            logits: Tensor = compute(hidden).clone()
            how(logits)
            return logits

        model.compute_logits = changed

    yield change
    del model.compute_logits


@both
def test_token_ids(real: Running, path: str) -> None:
    body = {**BODIES[path], "return_token_ids": True, "n": 2, "temperature": 1, "seed": 1}
    whole = real.post(path, body).json()
    tokenizer = real.engine.tokenizer
    prompt = tokenizer.encode("Return the")
    if path == CHAT:
        text = "<s>[user]Return the[assistant]"
        prompt = tokenizer.encode(text, add_special_tokens=False)
        assert whole["prompt_token_ids"] == prompt
    for choice in whole["choices"]:
        assert path == CHAT or choice["prompt_token_ids"] == prompt
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert tokenizer.decode([*prompt, *choice["token_ids"]]) == tokenizer.decode(prompt) + text
    chunks = events(real.post(path, {**body, "stream": True}))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in whole["choices"]:
        pieces = [each["token_ids"] or [] for each in choices if each["index"] == choice["index"]]
        assert [token for piece in pieces for token in piece] == choice["token_ids"]
    shown = [each["prompt_token_ids"] for each in (chunks if path == CHAT else choices)]
    assert [each for each in shown if each is not None] == [prompt] * (1 if path == CHAT else 2)
    plain = real.post(path, BODIES[path]).json()["choices"][0]
    assert plain["token_ids"] is None


def test_token_ids_while_text_is_held_back(real: Running) -> None:
    body = {**BODIES[COMPLETIONS], "return_token_ids": True, "allowed_token_ids": [230 % 256]}
    whole = real.post(COMPLETIONS, {**body, "stop": "zzz"}).json()["choices"][0]["token_ids"]
    choices = events(real.post(COMPLETIONS, {**body, "stream": True, "stop": "zzz"}))
    assert [t for each in choices for t in each["choices"][0]["token_ids"] or []] == whole
    assert len(whole) == 8


@both
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_called_by_their_ids(real: Running, path: str, stream: bool) -> None:
    asks = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2, "echo": True}
    body = {
        **BODIES[path],
        **asks,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "stream": stream,
    }
    answer = real.post(path, body)
    chunks = events(answer) if stream else [answer.json()]
    found, ids = [], []
    for choice in (chunk["choices"][0] for chunk in chunks):
        ids += choice["token_ids"] or []
        if path == COMPLETIONS and choice["prompt_token_ids"]:
            ids = [*choice["prompt_token_ids"], *ids]
        logprobs = choice["logprobs"] or {}
        if path == CHAT:
            found += [each["token"] for each in logprobs.get("content", [])]
            for each in logprobs.get("content", []):
                assert all(top["token"].startswith("token_id:") for top in each["top_logprobs"])
        else:
            found += logprobs.get("tokens", [])
            for top in logprobs.get("top_logprobs", []):
                assert top is None or all(name.startswith("token_id:") for name in top)
    assert found == [f"token_id:{token}" for token in ids]


@both
def test_log_probabilities_of_the_prompt(real: Running, llm: LLM, path: str) -> None:
    answer = real.post(path, {**BODIES[path], "prompt_logprobs": 2, "return_token_ids": True})
    content = answer.json()
    holder = content if path == CHAT else content["choices"][0]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    (expected,) = llm.generate(holder["prompt_token_ids"], params)
    assert len(holder["prompt_logprobs"]) == len(expected.prompt_logprobs)
    assert holder["prompt_logprobs"][0] is None
    for found, wanted in zip(
        holder["prompt_logprobs"][1:], expected.prompt_logprobs[1:], strict=True
    ):
        assert {int(token) for token in found} == set(wanted)
        for token, each in wanted.items():
            one = found[str(token)]
            assert one["logprob"] == pytest.approx(each.logprob, abs=1e-4)
            assert (one["rank"], one["decoded_token"]) == (each.rank, each.decoded_token)
    assert real.post(path, BODIES[path]).json().get("prompt_logprobs") is None


def test_log_probabilities_of_the_prompt_next_to_those_of_an_echo(real: Running) -> None:
    body = {**BODIES[COMPLETIONS], "echo": True}
    both_ = real.post(COMPLETIONS, {**body, "logprobs": 3, "prompt_logprobs": 0}).json()
    alone = real.post(COMPLETIONS, {**body, "logprobs": 3}).json()
    found, expected = both_["choices"][0], alone["choices"][0]
    assert found["logprobs"] == expected["logprobs"]
    assert all(len(each) == 1 for each in found["prompt_logprobs"][1:])


@both
@pytest.mark.parametrize("include_usage", [True, False])
def test_every_event_has_the_usage_so_far(real: Running, path: str, include_usage: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    body = {**BODIES[path], "stream": True, "stream_options": options, "return_token_ids": True}
    *chunks, last = events(real.post(path, body))
    if not include_usage:
        chunks.append(last)
    known = 0
    for chunk in chunks:
        known += len(chunk["choices"][0]["token_ids"] or [])
        # An event of the engine may become several, each with the tokens of all of them.
        assert chunk["usage"]["completion_tokens"] >= known
        assert chunk["usage"]["prompt_tokens"] > 0
    assert chunks[-1]["usage"]["completion_tokens"] == known
    assert (last["choices"] == []) == include_usage
    assert last["usage"] == {**chunks[-1]["usage"]}


@pytest.mark.parametrize("stream", [False, True])
@both
def test_minus_infinity_is_a_number(
    real: Running, path: str, stream: bool, change_logits: Any
) -> None:
    change_logits(lambda logits: logits[:, 10:].fill_(-math.inf))  # fewer than are asked for
    asks = {"logprobs": True, "top_logprobs": 20} if path == CHAT else {"logprobs": 20}
    body = {**BODIES[path], **asks, "stream": stream}
    if path == COMPLETIONS:
        body |= {"echo": True}
    if not stream:
        body |= {"prompt_logprobs": 20}
    answer = real.post(path, body)
    assert answer.status_code == 200, answer.text
    numbers: list[float] = []
    for chunk in events(answer) if stream else [answer.json()]:
        for at in chunk.get("prompt_logprobs") or []:
            numbers += [each["logprob"] for each in (at or {}).values()]
        for choice in chunk["choices"]:
            for at in choice.get("prompt_logprobs") or []:
                numbers += [each["logprob"] for each in (at or {}).values()]
            for each in (choice["logprobs"] or {}).get("content", []):
                numbers += [each["logprob"], *(top["logprob"] for top in each["top_logprobs"])]
            numbers += (choice["logprobs"] or {}).get("token_logprobs", [])
            for top in (choice["logprobs"] or {}).get("top_logprobs", []):
                numbers += (top or {}).values()
    # The first token of an echo follows nothing.
    assert numbers.count(None) == (path == COMPLETIONS)  # type: ignore[arg-type]
    assert -9999.0 in numbers


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_with_nan_logits_fails_alone(real: Running, stream: bool) -> None:
    core: Any = real.engine
    embedding = core._core.executor.worker.runner.model.model.embed_tokens

    def spoil(module: object, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.masked_fill((arguments[0] == 900).unsqueeze(-1), math.nan)

    body = {"prompt": [[5, 6], [7, 900]], "max_tokens": 4, "n": 2, "seed": 1, "ignore_eos": True}
    expected = real.post(COMPLETIONS, {**body, "prompt": [5, 6]}).json()["choices"]
    hook = embedding.register_forward_hook(spoil)
    try:
        answer = real.post(COMPLETIONS, {**body, "stream": stream})
        alone = real.post(COMPLETIONS, {**body, "prompt": [7, 900], "stream": stream})
    finally:
        hook.remove()
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events(answer) if stream else [answer.json()]:
        for choice in chunk["choices"]:
            known = choices.setdefault(choice["index"], {**choice, "text": ""})
            known["text"] += choice["text"]
            known["finish_reason"] = choice["finish_reason"] or known["finish_reason"]
    assert [choices[i]["text"] for i in (0, 1)] == [each["text"] for each in expected]
    for index in (2, 3):
        assert (choices[index]["text"], choices[index]["finish_reason"]) == ("", "error")
        assert "NaN logits" in choices[index]["error"]["message"]
    assert choices[0]["error"] is None
    assert alone.status_code == 500
    error = alone.json()["error"]
    assert error["code"] == "non_finite_logits"
    assert "NaN logits" in error["message"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_logits_inside_of_a_prompt_are_no_numbers(
    real: Running, change_logits: Any, value: float
) -> None:
    def spoil(logits: Tensor) -> None:
        if len(logits) > 1:  # the places of a prompt, but not the one that an answer follows
            logits[1, 7] = value

    change_logits(spoil)
    assert real.post(COMPLETIONS, BODIES[COMPLETIONS]).status_code == 200
    answer = real.post(COMPLETIONS, {**BODIES[COMPLETIONS], "prompt_logprobs": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "non_finite_logits")
    core: Any = real.engine
    core._core.check_idle()


def test_a_mask_does_not_hide_nan_logits(real: Running, change_logits: Any) -> None:
    def spoil(logits: Tensor) -> None:
        logits[:, 7] = math.nan

    change_logits(spoil)
    body = {**BODIES[COMPLETIONS], "allowed_token_ids": [8, 9]}
    for asks in ({}, {"logprobs": 1}):
        answer = real.post(COMPLETIONS, {**body, **asks})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "non_finite_logits")


def test_a_request_that_leaves_no_token_is_the_clients_mistake(real: Running) -> None:
    (token,) = real.engine.tokenizer.encode("z", add_special_tokens=False)
    body = {"prompt": "x", "allowed_token_ids": [token], "bad_words": ["zz"], "max_tokens": 3}
    answer = real.post(COMPLETIONS, body)
    assert answer.status_code == 400
    assert "No token is left" in answer.json()["error"]["message"]


def test_words_need_a_tokenizer(tmp_path: Path) -> None:
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    engine: Any = AsyncEngine(tmp_path, config=EngineConfig(load_format="dummy"))
    with running(engine) as server:
        body = {"prompt": [5, 6], "max_tokens": 2}
        assert server.post(COMPLETIONS, body).status_code == 200
        answer = server.post(COMPLETIONS, {**body, "bad_words": ["x"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_tokenizer")
    engine.shutdown()


@both
def test_a_long_prompt_is_cut(real: Running, path: str) -> None:
    text = "word " * 4000
    body = {**BODIES[path], "truncate_prompt_tokens": -1, "return_token_ids": True}
    body |= {"prompt": text} if path == COMPLETIONS else {"messages": [{**USER, "content": text}]}
    content = real.post(path, body).json()
    ids = (content if path == CHAT else content["choices"][0])["prompt_token_ids"]
    assert len(ids) == real.engine.max_model_len - 8
    tokenizer = real.engine.tokenizer
    whole = tokenizer.encode(text if path == COMPLETIONS else f"<s>[user]{text}[assistant]",
                             add_special_tokens=False)  # fmt: skip
    is_text = path == COMPLETIONS  # has a token that the tokenizer adds
    assert ids[is_text:] == whole[is_text - len(ids) :]
    assert ids[:is_text] == [tokenizer.bos_token_id][:is_text]


USER = {"role": "user"}


def test_the_echo_of_a_cut_prompt_is_what_is_left(real: Running) -> None:
    body = {**BODIES[COMPLETIONS], "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 0}
    assert real.post(COMPLETIONS, body).json()["choices"][0]["text"] == " the"


@both
def test_an_id_of_the_clients(real: Running, path: str) -> None:
    body = {**BODIES[path], "request_id": "mine"}
    kind = "chatcmpl" if path == CHAT else "cmpl"
    for _ in range(2):
        assert real.post(path, body).json()["id"] == f"{kind}-mine"

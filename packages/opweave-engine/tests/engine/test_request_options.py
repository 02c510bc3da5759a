"""Options of a request that limit its prompt, its tokens and its text, with a trained model."""

from __future__ import annotations

import json
import re
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from models.tiny_checkpoints import write_tokenizer
from opweave.config import CacheConfig, EngineConfig
from opweave_engine import (
    LLM,
    Checkpoint,
    NoTokenLeftError,
    PromptError,
    SamplingParams,
    SamplingParamsError,
    Tokenizer,
)
from opweave_engine.sampling.history import BadWords
from server.fake_engine import CHECKPOINT

PROMPT = "Return the list of"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(CHECKPOINT, dtype="float32")


def answer(llm: LLM, prompt: Any = PROMPT, **options: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**{**GREEDY, **options}))[0].outputs[0]


def test_special_tokens_are_added_unless_not(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Return", add_special_tokens=False)
    bos = llm.tokenizer.bos_token_id
    params = SamplingParams(max_tokens=1)
    for given, expected in [(True, [bos, bos, *ids]), (False, [bos, *ids])]:
        (output,) = llm.generate("<s>Return", params, add_special_tokens=given)
        assert output.prompt_token_ids == expected
        (*_, output) = llm.stream("<s>Return", params, add_special_tokens=given)
        assert output.prompt_token_ids == expected


def test_special_tokens_of_a_conversation(llm: LLM) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    messages = [{"role": "user", "content": "Return"}]
    ids = llm.tokenizer.encode("Return", add_special_tokens=False)
    bos, params = llm.tokenizer.bos_token_id, SamplingParams(max_tokens=1)
    for options, count in [({}, 1), ({"add_special_tokens": True}, 2)]:
        (output,) = llm.chat(messages, params, chat_template=template, **options)
        assert output.prompt_token_ids == [bos] * count + ids
        assert output.prompt == "<s>Return"


@pytest.mark.parametrize("keep", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_a_truncated_prompt_is_that_of_transformers(
    llm: LLM, keep: int, add_special_tokens: bool
) -> None:
    theirs = AutoTokenizer.from_pretrained(CHECKPOINT, truncation_side="left")
    text = "Return the list of all names in the module."
    expected = theirs(
        text, truncation=True, max_length=keep, add_special_tokens=add_special_tokens
    )["input_ids"]
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=keep)
    (output,) = llm.generate(text, params, add_special_tokens=add_special_tokens)
    assert output.prompt_token_ids == expected
    ids = llm.tokenizer.encode(text)
    (output,) = llm.generate(ids, params)
    assert output.prompt_token_ids == ids[-keep:]


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_special_tokens_at_both_ends(side: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0],
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    theirs = AutoTokenizer.from_pretrained(tmp_path, truncation_side=side)
    tokenizer = Tokenizer(Checkpoint(tmp_path))
    text = "the quick dog and the lazy cat"
    for keep in range(2, 9):
        expected = theirs(text, truncation=True, max_length=keep)["input_ids"]
        assert tokenizer.encode(text, keep=keep, truncation_side=side) == expected
        assert len(expected) == keep
    assert len(tokenizer.encode(text, keep=1)) == 1


def test_truncation_to_the_context_leaves_room_for_the_answer(llm: LLM) -> None:
    ids = [5, 6] * 400
    with pytest.raises(PromptError, match="context"):
        llm.generate(ids, SamplingParams(max_tokens=9))
    room = llm._core.max_model_len
    for limit, expected in [(9, room - 9), (None, room - 1)]:
        params = SamplingParams(max_tokens=limit, truncate_prompt_tokens=-1, temperature=0)
        (output,) = llm.generate(ids, params)
        assert output.prompt_token_ids == ids[-expected:]
        assert len(output.outputs[0].token_ids) <= room - expected


def test_only_allowed_tokens_are_chosen(llm: LLM) -> None:
    allowed = [9, 300, 301, 302, 1000]
    for temperature in (0, 1.5):
        found = answer(llm, allowed_token_ids=allowed, temperature=temperature, logprobs=0)
        assert set(found.token_ids) <= set(allowed)
    # The best of them, by the model's own log-probabilities of every token.
    places = llm.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0, logprobs=20))
    best = answer(llm, allowed_token_ids=list(places[0].outputs[0].logprobs[0])[7:9], max_tokens=1)
    assert best.token_ids == [list(places[0].outputs[0].logprobs[0])[7]]


def test_bad_words_do_not_appear(llm: LLM) -> None:
    free = answer(llm)
    words = free.text.split()
    assert len(words) > 2
    hits = 0
    for word in words:
        sequences = BadWords([word], llm.tokenizer)._sequences
        found = answer(llm, bad_words=[word])
        hits += any(has(free.token_ids, ids) for ids in sequences)
        assert not any(has(found.token_ids, ids) for ids in sequences)
    assert hits > 2
    assert answer(llm, bad_words=["zebra"]).text == free.text


def has(ids: list[int], part: tuple[int, ...]) -> bool:
    return any(tuple(ids[at : at + len(part)]) == part for at in range(len(ids)))


def test_bad_words_are_forbidden_as_in_transformers(llm: LLM) -> None:
    words = BadWords(["list of", "names"], llm.tokenizer)
    sequences = [list(ids) for ids in words._sequences]
    assert any(len(ids) > 1 for ids in sequences)
    theirs = NoBadWordsLogitsProcessor(sequences)
    for text in ("", "the list", " list", "names of", "the list of", "a"):
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            assert words.forbidden(ids) == set(words.single)
            continue
        scores = theirs(torch.tensor([ids]), torch.zeros(1, 2048))
        expected = set((scores[0] == -torch.inf).nonzero().flatten().tolist())
        assert words.forbidden(ids) == expected


@pytest.mark.parametrize("includes", [False, True])
def test_the_stop_string_is_shown_or_not(llm: LLM, includes: bool) -> None:
    text = answer(llm).text
    stop = text[7:11]
    found = answer(llm, stop=stop, include_stop_str_in_output=includes)
    assert found.text == text[: text.index(stop)] + (stop if includes else "")
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    shown = [
        output.outputs[0].text
        for output in llm.stream(
            PROMPT, SamplingParams(**GREEDY, stop=stop, include_stop_str_in_output=includes)
        )
    ]
    assert shown[-1] == found.text
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))


@pytest.mark.parametrize("includes", [False, True])
def test_the_stop_token_is_shown_or_not(llm: LLM, includes: bool) -> None:
    ids = answer(llm).token_ids
    last = next(place for place in range(3, 12) if ids[place] not in ids[:place])
    found = answer(llm, stop_token_ids=[ids[last]], include_stop_str_in_output=includes)
    assert found.token_ids == ids[: last + 1]
    assert found.text == llm.tokenizer.decode(ids[: last + includes])
    assert found.stop_reason == ids[last]


def test_options_that_leave_no_token(llm: LLM) -> None:
    with pytest.raises(SamplingParamsError, match="ids are from 0 to 2047"):
        answer(llm, allowed_token_ids=[2048])
    single = BadWords(["list"], llm.tokenizer).single
    assert single
    with pytest.raises(SamplingParamsError, match="bad_words must leave"):
        answer(llm, allowed_token_ids=list(single), bad_words=["list"])
    with pytest.raises(SamplingParamsError, match="min_tokens=1"):
        answer(llm, allowed_token_ids=[300], stop_token_ids=[300], min_tokens=1)
    (token,) = llm.tokenizer.encode("z", add_special_tokens=False)
    assert BadWords(["zz"], llm.tokenizer).forbidden([token]) == {token}
    assert answer(llm, allowed_token_ids=[token], bad_words=["zz"], max_tokens=1).text == "z"
    with pytest.raises(NoTokenLeftError, match="No token is left to choose"):
        answer(llm, allowed_token_ids=[token], bad_words=["zz"])


def test_a_cache_salt_keeps_prefixes_apart() -> None:
    llm = LLM(CHECKPOINT, config=EngineConfig(dtype="float32", cache=CacheConfig(block_size=16)))
    ids, params = [5, 6, 7, 8] * 20, SamplingParams(temperature=0, max_tokens=4, n=2)

    def cached(*prompts: Any) -> list[int]:
        outputs = llm.generate(list(prompts), params)
        assert all(output.prompt_token_ids == ids for output in outputs)
        assert len({tuple(o.token_ids) for output in outputs for o in output.outputs}) == 1
        return [output.num_cached_tokens for output in outputs]

    def salted(salt: str | None, **prompt: Any) -> dict[str, Any]:
        return {**(prompt or {"prompt_token_ids": ids}), "cache_salt": salt}

    assert cached(ids) == [0]
    assert cached(salted("ann")) == [0]
    assert cached(salted("bob"), salted("ann", prompt=ids), salted(None), ids) == [0, 64, 64, 64]
    # A salt with the bytes of the first block does not continue the block of another user.
    (output,) = llm.generate(
        {"prompt_token_ids": ids[16:], "cache_salt": array("q", ids[:16]).tobytes().decode()},
        params,
    )
    assert output.num_cached_tokens == 0
    assert llm.generate({"prompt": PROMPT}, params)[0].prompt == PROMPT


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ({"prompt": "x", "cache_salt": ""}, "cache_salt='' must be a non-empty string"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt=5 must be a non-empty string"),
        ({"prompt": "x", "cash_salt": "a"}, "'cash_salt'"),
        ({"prompt": "x", "prompt_token_ids": [5]}, "prompt or prompt_token_ids"),
        ({"prompt_token_ids": "x"}, "prompt_token_ids='x'"),
        ({"cache_salt": "a"}, "prompt or prompt_token_ids"),
    ],
)
def test_dicts_that_are_not_prompts(llm: LLM, prompt: Any, shown: str) -> None:
    with pytest.raises(PromptError, match=re.escape(shown)):
        llm.generate([prompt])
    with pytest.raises(PromptError, match=re.escape(shown)):
        next(llm.stream(prompt))

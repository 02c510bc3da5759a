"""Structured output in the engine: batches, streams, preemption, ranks and replicas."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.test_data_parallel import replicated
from models.tiny_checkpoints import EOS, Checkpoints, edit_config
from opweave.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from opweave_engine import (
    LLM,
    AsyncEngine,
    EngineError,
    SamplingParams,
    SamplingParamsError,
    StructuredOutputsParams,
)
from server.fake_engine import CHECKPOINT

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
SMALL = EngineConfig(
    cache=CacheConfig(block_size=16, num_blocks=9),
    scheduler=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=16),
)


def form(**options: Any) -> SamplingParams:
    names = ("json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace")
    chosen = {name: options.pop(name) for name in names if name in options}
    options = {"seed": 1, "max_tokens": 120, **options}
    return SamplingParams(structured_outputs=StructuredOutputsParams(**chosen), **options)


FREE = SamplingParams(max_tokens=60, seed=5, ignore_eos=True)
MIXED = [
    SamplingParams(max_tokens=120, seed=1, n=3, structured_outputs=JSON, repetition_penalty=1.1),
    FREE,
    form(regex=r"[a-z]{3,8}@[a-z]+\.(com|org)", n=2, temperature=0.7),
    form(choice=["yes", "no", "maybe so"], temperature=0),
    form(grammar='root ::= "ab" | "(" root ")"', top_k=20),
    replace(FREE, stop="e"),
]
PROMPTS = ["Return the", "def f", "x", "class Book", "A", "import os"]


def checked(texts: list[list[str]]) -> None:
    for text in texts[0]:
        jsonschema.validate(json.loads(text), SCHEMA)
    for text in texts[2]:
        assert re.fullmatch(r"[a-z]{3,8}@[a-z]+\.?(com|org)?", text)
    assert texts[3][0] in ("yes", "no", "maybe so")
    assert re.fullmatch(r"\(*(ab)?\)*", texts[4][0])


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(CHECKPOINT, dtype="float32")


def test_a_mixed_batch_gives_what_each_request_asks_for(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, MIXED)
    checked([[answer.text for answer in output.outputs] for output in outputs])
    for output in outputs[0], outputs[3]:
        assert {answer.finish_reason for answer in output.outputs} == {"stop"}
    alone = [llm.generate(p, s)[0] for p, s in zip(PROMPTS, MIXED, strict=True)]
    for one, other in zip(outputs, alone, strict=True):
        assert [a.token_ids for a in one.outputs] == [a.token_ids for a in other.outputs]


def test_a_preempted_answer_is_the_same(llm: LLM) -> None:
    small = LLM(CHECKPOINT, dtype="float32", config=SMALL)
    wanted = llm.generate(PROMPTS * 3, MIXED * 3)
    found = small.generate(PROMPTS * 3, MIXED * 3)
    assert small.stats().preemptions > 0
    for one, other in zip(found, wanted, strict=True):
        assert [a.token_ids for a in one.outputs] == [a.token_ids for a in other.outputs]


def test_an_answer_ends_only_where_the_grammar_does(checkpoint: Checkpoints) -> None:
    llm = LLM(checkpoint("llama")[0])
    # The end-of-text token is by far the most likely one.
    eager = form(regex="[a-f]{12}", logit_bias={EOS: 100.0}, n=4)
    for answer in llm.generate("x", eager)[0].outputs:
        assert re.fullmatch("[a-f]{12}", answer.text)
        assert answer.finish_reason == "stop"
    assert llm.generate("x", form(regex="[a-f]*", logit_bias={EOS: 100.0}))[0].outputs[0].text == ""
    # And where it cannot go on, it ends, though nothing wants it to.
    late = form(regex="[a-f]{3}", logit_bias={EOS: -100.0}, min_tokens=20, ignore_eos=True)
    (answer,) = llm.generate("x", late)[0].outputs
    assert re.fullmatch("[a-f]{3}", answer.text)
    assert answer.finish_reason == "stop"


def test_min_tokens_hold_while_the_grammar_can_go_on(llm: LLM) -> None:
    (end,) = llm.tokenizer.eos_token_ids
    params = form(regex="[ab]*", min_tokens=9, logit_bias={end: 100.0})
    (answer,) = llm.generate("x", params)[0].outputs
    assert len(answer.token_ids) == 10  # the end-of-text token included
    assert re.fullmatch("[ab]+", answer.text)
    params = replace(params, ignore_eos=True, min_tokens=0, max_tokens=25)
    (answer,) = llm.generate("x", params)[0].outputs
    assert (len(answer.token_ids), answer.finish_reason) == (25, "length")
    # Every token that the grammar allows is one that min_tokens forbids.
    only = llm.tokenizer.encode("a", add_special_tokens=False)
    params = form(regex="a{3}", stop_token_ids=only, min_tokens=2)
    assert llm.generate("x", params)[0].outputs[0].finish_reason == "stop"


def test_other_restrictions_hold_too(llm: LLM) -> None:
    (a,) = llm.tokenizer.encode("a", add_special_tokens=False)
    eos = sorted(llm.tokenizer.eos_token_ids)
    params = form(regex="[ab]{6}", allowed_token_ids=[a, *eos])
    assert llm.generate("x", params)[0].outputs[0].text == "aaaaaa"
    params = form(regex="[ab]{6}", bad_words=["a"])
    (answer,) = llm.generate("x", params)[0].outputs
    assert a not in answer.token_ids
    assert re.fullmatch("[ab]{6}", answer.text)
    with pytest.raises(EngineError, match="No token is left to choose"):
        llm.generate("x", form(regex="b{6}", allowed_token_ids=[a, *eos]))


def test_a_vocabulary_that_fills_no_word(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(CHECKPOINT, path)
    edit_config(path, vocab_size=2011)
    llm = LLM(path, config=EngineConfig(load_format="dummy"))  # its tokenizer has more tokens
    params = [form(regex="[ab]{6}"), form(regex="[ab]{6}", allowed_token_ids=[*range(3, 2011)])]
    for output in llm.generate(["x", "y"], params):
        assert re.fullmatch("[ab]{6}", output.outputs[0].text)


def test_stop_strings_end_it_as_any_answer(llm: LLM) -> None:
    (answer,) = llm.generate("x", form(choice=["one, two"], stop=","))[0].outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("one", "stop", ",")


def test_an_answer_that_is_complete_at_the_limit_has_stopped(llm: LLM) -> None:
    (answer,) = llm.generate("x", form(regex="7", max_tokens=1))[0].outputs
    assert (answer.text, answer.finish_reason) == ("7", "stop")
    (answer,) = llm.generate("x", form(regex="7{9}", max_tokens=2))[0].outputs
    assert answer.finish_reason == "length"


def test_streams_grow_to_the_same_text(llm: LLM) -> None:
    params = replace(MIXED[0], n=1)
    *_, last = texts = [o.outputs[0].text for o in llm.stream("Return the", params)]
    assert last == llm.generate("Return the", params)[0].outputs[0].text
    assert all(last.startswith(text) for text in texts)


def test_a_grammar_that_becomes_too_complex_fails_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = llm._core.grammars.advance

    def fail(taken: Any) -> None:
        real(pairs := list(taken))
        for state, _ in pairs:
            if state is not None:
                state.error = SamplingParamsError("structured_outputs: too complex.")

    monkeypatch.setattr(llm._core.grammars, "advance", fail)
    with pytest.raises(SamplingParamsError, match="too complex"):
        llm.generate("x", form(regex="[a-z]+", n=3))
    assert llm.generate("x", FREE)[0].outputs[0].finish_reason
    llm._core.check_idle()


def test_a_grammar_without_a_next_token_leaves_the_other_requests(llm: LLM) -> None:
    dead_end = form(grammar='start: "a" X\nX: /b/ & /c/')
    params = [MIXED[1], dead_end, MIXED[3]]
    one, failed, other = llm.generate(PROMPTS[1:4], params)
    assert isinstance(failed.error, SamplingParamsError)
    assert "the answer cannot go on" in str(failed.error)
    for output, prompt, asked in ((one, PROMPTS[1], MIXED[1]), (other, PROMPTS[3], MIXED[3])):
        (alone,) = llm.generate(prompt, asked)
        assert output.error is None
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    with pytest.raises(SamplingParamsError, match="the answer cannot go on"):
        llm.generate("x", dead_end)
    llm._core.check_idle()


async def _texts(engine: Any, params: SamplingParams, name: str) -> list[str]:
    outputs = [o async for o in engine.generate("Return the", params, request_id=name)]
    return [answer.text for answer in outputs[-1].outputs]


def test_grammars_compile_outside_of_the_event_loop(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncEngine(CHECKPOINT, dtype="float32")
    quick, loop_goes_on = engine._core.grammars._quick, threading.Event()
    real = quick.check

    def waits_for_the_loop(*arguments: Any) -> int:
        assert loop_goes_on.wait(60)
        return real(*arguments)

    monkeypatch.setattr(quick, "check", waits_for_the_loop)

    async def work() -> None:
        asking = [asyncio.create_task(_texts(engine, p, f"{i}")) for i, p in enumerate(MIXED)]
        await asking[1]  # free text does not wait for a grammar
        loop_goes_on.set()
        for params, task in zip(MIXED, asking, strict=True):
            (wanted,) = llm.generate("Return the", params)
            assert await task == [answer.text for answer in wanted.outputs]
        with pytest.raises(SamplingParamsError, match="unclosed group"):
            await _texts(engine, form(regex="("), "bad")

    try:
        asyncio.run(asyncio.wait_for(work(), 120))
    finally:
        engine.shutdown()


def test_replicas_follow_grammars(llm: LLM) -> None:
    def make(_: int) -> AsyncEngine:
        return AsyncEngine(CHECKPOINT, dtype="float32")

    async def work() -> None:
        with replicated(make) as (engine, _):
            texts = await asyncio.gather(
                *(_texts(engine, params, f"{i}") for i, params in enumerate(MIXED))
            )
            for params, found in zip(MIXED, texts, strict=True):
                (wanted,) = llm.generate("Return the", params)
                assert found == [answer.text for answer in wanted.outputs]
            with pytest.raises(SamplingParamsError, match="unclosed group") as caught:
                await _texts(engine, form(regex="("), "bad")
            assert caught.value.parameter == "structured_outputs"

    asyncio.run(asyncio.wait_for(work(), 120))


def test_ranks_agree_on_grammars(checkpoint: Checkpoints) -> None:
    path = checkpoint("llama")[0]
    config = EngineConfig(
        cache=CacheConfig(block_size=16, num_blocks=32),
        parallel=ParallelConfig(tensor_parallel_size=2, timeout=60.0),
    )
    params = [form(json=SCHEMA, disable_any_whitespace=True, temperature=0), form(regex="[a-f]{9}")]
    prompts = ["first", "second"]
    wanted = [o.outputs[0].text for o in LLM(path).generate(prompts, params)]
    two = LLM(path, config=config)
    try:
        found = [o.outputs[0].text for o in two.generate(prompts, params)]
    finally:
        two.shutdown()
    assert re.fullmatch("[a-f]{9}", found[1])
    assert found == wanted

"""Sampling options hold in the engine: alone, with chunked prefill, and after preemption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.tiny_checkpoints import EOS, VOCABULARY, Checkpoints, random_ids
from opweave.config import CacheConfig, EngineConfig, SchedulerConfig
from opweave_engine import (
    LLM,
    CompletionOutput,
    EngineCore,
    EngineError,
    InvalidArgumentError,
    Logprob,
    NonFiniteLogitsError,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    SamplingParamsError,
)
from opweave_engine.request import OutputAccumulator, merge_deltas

PROMPTS = [random_ids(seed, count) for seed, count in enumerate([1, 7, 33, 2, 40])]
# Prompts are computed in parts, and requests lose their blocks and are computed again.
SMALL = EngineConfig(
    cache=CacheConfig(block_size=16, num_blocks=7),
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=10),
)


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoints) -> LLM:
    return LLM(checkpoint("llama")[0], config=EngineConfig(cache=CacheConfig(block_size=16)))


@pytest.fixture
def small(checkpoint: Checkpoints) -> LLM:
    return LLM(checkpoint("llama")[0], config=SMALL)


def sampled(**options: Any) -> SamplingParams:
    given = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, "seed": 4, **options}
    return SamplingParams(**given)


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **options})


def answers(llm: LLM, prompt: Any, params: SamplingParams) -> list[CompletionOutput]:
    return llm.generate(prompt, params)[0].outputs


def run(core: EngineCore) -> dict[str, list[RequestOutput]]:
    """Return all outputs of each request, to the last."""
    found: dict[str, list[RequestOutput]] = {}
    while core.has_unfinished:
        for output in core.step():
            found.setdefault(output.request_id, []).append(output)
        core.scheduler.cache.check_integrity()
    core.check_idle()
    return found


def model_scores(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        scores: torch.Tensor = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return scores


def check_logprobs(found: Any, scores: torch.Tensor, token: int, count: int) -> None:
    order = scores.argsort(descending=True).tolist()
    assert set(found) == {token, *order[:count]}
    for each, known in found.items():
        assert known.logprob == pytest.approx(float(scores[each]), abs=1e-4)
        assert order[known.rank - 1] == each


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.7}, {"min_tokens": 9, "ignore_eos": False}, {"logit_bias": {7: 2.5}}],
    ids=str,
)
def test_greedy_is_that_of_transformers(
    options: dict[str, Any], checkpoint: Checkpoints, llm: LLM, small: LLM
) -> None:
    names = {"min_tokens": "min_new_tokens", "repetition_penalty": "repetition_penalty"}
    theirs = {names[name]: value for name, value in options.items() if name in names}
    if bias := options.get("logit_bias"):
        theirs["sequence_bias"] = [[[token], value] for token, value in bias.items()]
    # An end-of-text token that the model likes.
    plain = [answer.token_ids for p in PROMPTS for answer in answers(llm, p, greedy())]
    ends = plain[1][3]
    stops = {} if options.get("ignore_eos", True) else {"stop_token_ids": [ends, EOS]}
    model, wanted = checkpoint("llama")[1], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        ended = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
            eos_token_id=[ends, EOS] if stops else None, **theirs,
        )  # fmt: skip
        wanted.append(ended[0, len(prompt) :].tolist())
    params = greedy(**options, **stops)
    for engine in (llm, small):
        outputs = engine.generate(PROMPTS * 2, params)
        assert [output.outputs[0].token_ids for output in outputs] == wanted * 2
    assert wanted != plain
    assert small.stats().preemptions > 0


def test_several_answers_share_the_prompt(llm: LLM) -> None:
    before = llm.stats()
    found = answers(llm, PROMPTS[4], sampled(n=5))
    after = llm.stats()
    assert [answer.index for answer in found] == list(range(5))
    assert len({tuple(answer.token_ids) for answer in found}) == 5
    assert all(len(answer.token_ids) == 12 for answer in found)
    # The first one computes the prompt, the others find its full blocks.
    assert after.prefix_hits - before.prefix_hits >= 4 * 32
    assert after.prompt_tokens - before.prompt_tokens == len(PROMPTS[4])
    assert after.finished["length"] - before.finished["length"] == 5
    for answer in found:
        assert answer.text == llm.tokenizer.decode(answer.token_ids)


def test_an_answer_depends_on_seed_and_place_only(llm: LLM, small: LLM) -> None:
    alone = answers(llm, PROMPTS[1], sampled(n=1))[0].token_ids
    three = [answer.token_ids for answer in answers(llm, PROMPTS[1], sampled(n=3))]
    assert three[0] == alone
    other = [sampled(n=4, seed=9, top_k=9), sampled(n=2, top_p=0.7, presence_penalty=1), greedy()]
    for engine in (llm, small):
        outputs = engine.generate([PROMPTS[2], PROMPTS[1], PROMPTS[4], PROMPTS[0]],
                                  [other[0], sampled(n=3), other[1], other[2]])  # fmt: skip
        assert [answer.token_ids for answer in outputs[1].outputs] == three
    assert small.stats().preemptions > 0
    assert [a.token_ids for a in answers(llm, PROMPTS[1], sampled(n=3, seed=5))] != three
    unseeded = answers(llm, PROMPTS[1], sampled(n=3, seed=None))
    assert len({tuple(answer.token_ids) for answer in unseeded}) == 3


@pytest.mark.parametrize("kind", ["mamba2", "gemma3"])
def test_several_answers_of_other_caches(kind: str, checkpoint: Checkpoints) -> None:
    llm = LLM(checkpoint(kind)[0], config=EngineConfig(cache=CacheConfig(block_size=16)))
    found = answers(llm, PROMPTS[2], greedy(n=3))
    assert [answer.token_ids for answer in found] == [found[0].token_ids] * 3
    assert found[0].token_ids == answers(llm, PROMPTS[2], greedy())[0].token_ids


def test_answers_that_end_at_different_times(llm: LLM) -> None:
    free = answers(llm, PROMPTS[1], sampled(n=4))
    ends = free[2].token_ids[1]
    core, params = llm._core, sampled(n=4, stop_token_ids=[ends])
    core.add_request(core.prepare("a", PROMPTS[1], params))
    with pytest.raises(InvalidArgumentError, match="'a' is in use"):
        core.add_request(core.prepare("a", PROMPTS[1], params))
    outputs = run(core)["a"]
    assert [output.finished for output in outputs].index(True) == len(outputs) - 1
    for one, two in pairwise(outputs):
        for before, after in zip(one.outputs, two.outputs, strict=True):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert after.text.startswith(before.text)
    for whole, answer in zip(free, outputs[-1].outputs, strict=True):
        count = whole.token_ids.index(ends) + 1 if ends in whole.token_ids else 12
        assert answer.token_ids == whole.token_ids[:count]
        is_ended = ends in answer.token_ids
        assert answer.finish_reason == ("stop" if is_ended else "length")
        assert answer.stop_reason == (ends if is_ended else None)
        shown = answer.token_ids[:-1] if is_ended else answer.token_ids
        assert answer.text == llm.tokenizer.decode(shown)


def test_aborted_in_the_middle(checkpoint: Checkpoints) -> None:
    core = EngineCore(checkpoint("llama")[0], SMALL)
    for steps in range(9):
        core.add_request(core.prepare("a", PROMPTS[4], sampled(n=3)))
        core.add_request(core.prepare("b", PROMPTS[1], sampled(n=2)))
        for _ in range(steps):
            core.step()
        (last,) = core.abort(["a", "nobody"])
        assert last.finished
        assert {answer.finish_reason for answer in last.outputs} == {"abort"}
        (finished,) = run(core).values()
        assert finished[-1].finished
    assert core.stats().finished == {"abort": 27, "length": 18}


def test_one_failure_ends_all_answers(checkpoint: Checkpoints) -> None:
    core = EngineCore(checkpoint("llama")[0], EngineConfig())
    core.add_request(core.prepare("a", PROMPTS[1], sampled(n=3)))
    core.step()
    core.executor.worker.runner.model.model.norm.weight.fill_(float("nan"))  # type: ignore[attr-defined]
    outputs = run(core)["a"]
    assert len(outputs) == 1
    assert outputs[0].finished
    assert isinstance(outputs[0].error, NonFiniteLogitsError)
    assert core.stats().finished == {"error": 3}


def test_what_a_failed_request_computed_is_not_found(checkpoint: Checkpoints) -> None:
    core = EngineCore(checkpoint("llama")[0], SMALL)
    model = core.executor.worker.runner.model  # type: ignore[attr-defined]
    model.model.embed_tokens.weight.data[7] = float("nan")
    shared = PROMPTS[4][:32]
    # Nobody looks at the scores of the parts of its prompt but the last.
    core.add_request(core.prepare("bad", [*shared, 7, *[9] * 30], greedy()))
    assert isinstance(run(core)["bad"][-1].error, NonFiniteLogitsError)
    core.add_request(core.prepare("good", [*shared, 9], greedy()))
    good = run(core)["good"][-1]
    assert good.error is None
    assert good.num_cached_tokens == 0
    core.check_idle()


@pytest.mark.parametrize("part", ["detokenizer", "output", "bad_words"])
def test_an_exception_in_one_request_leaves_the_others(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    core = EngineCore(checkpoint("llama")[0], SMALL)
    params = sampled(max_tokens=6, logprobs=1, ignore_eos=True)
    core.add_request(core.prepare("good", PROMPTS[1], params))
    alone = run(core)["good"][-1].outputs[0]
    bad = core.prepare("bad", PROMPTS[2], replace(params, n=2, bad_words=["x"]))
    for name, request in (("good", core.prepare("good", PROMPTS[1], params)), ("bad", bad)):
        assert request.request_id == name
        core.add_request(request)

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("by chance")

    core.step()
    broken = bad.outputs[1]
    target = {
        "detokenizer": (broken._detokenizer._decoder, "push"),
        "output": (broken, "append"),
        "bad_words": (broken._bad_words, "forbidden"),
    }[part]
    monkeypatch.setattr(*target, fail)
    outputs = run(core)
    assert outputs["bad"][-1].finished
    assert isinstance(outputs["bad"][-1].error, EngineError)
    assert "ZeroDivisionError: by chance" in str(outputs["bad"][-1].error)
    last = outputs["good"][-1]
    assert (last.error, last.outputs[0].token_ids) == (None, alone.token_ids)
    core.check_idle()


def test_a_failed_detokenizer_does_not_prevent_the_end(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(checkpoint("llama")[0], SMALL)
    request = core.prepare("a", PROMPTS[1], sampled(max_tokens=2, ignore_eos=True))
    core.add_request(request)

    def fail() -> str:
        raise ZeroDivisionError("by chance")

    monkeypatch.setattr(request.outputs[0]._detokenizer._decoder, "finish", fail)
    (*_, last) = run(core)["a"]
    assert last.finished
    assert "ZeroDivisionError" in str(last.error)
    core.check_idle()


def test_the_error_of_a_stream_is_told_to_its_reader_only(checkpoint: Checkpoints) -> None:
    llm = LLM(checkpoint("llama")[0])
    model = llm._core.executor.worker.runner.model  # type: ignore[attr-defined]
    model.model.embed_tokens.weight.data[7] = float("nan")
    wanted = answers(llm, [60, 61], greedy())
    stream = llm.stream([50, 51], greedy(logit_bias={7: 100.0}))
    assert next(stream).outputs[0].token_ids == [7]
    assert answers(llm, [60, 61], greedy()) == wanted
    with pytest.raises(NonFiniteLogitsError):
        next(stream)


def test_log_probabilities(checkpoint: Checkpoints, llm: LLM, small: LLM) -> None:
    model = checkpoint("llama")[1]
    params = [
        sampled(logprobs=3, prompt_logprobs=2, temperature=2.0, n=2),
        greedy(logprobs=0, prompt_logprobs=0),
        greedy(prompt_logprobs=20, max_tokens=40),
        greedy(),
        sampled(logprobs=5, repetition_penalty=2.0),
    ]
    for engine in (llm, llm, small):  # the second time, prompts are in the cache
        for prompt, asked, output in zip(
            PROMPTS, params, engine.generate(PROMPTS, params), strict=True
        ):
            for answer in output.outputs:
                scores = model_scores(model, [*prompt, *answer.token_ids])
                if asked.logprobs is None:
                    assert answer.logprobs is None
                    continue
                at = len(prompt) - 1
                for place, found in enumerate(answer.logprobs):
                    check_logprobs(
                        found, scores[at + place], answer.token_ids[place], asked.logprobs
                    )
            scores = model_scores(model, prompt)
            if asked.prompt_logprobs is None:
                assert output.prompt_logprobs is None
                continue
            assert output.prompt_logprobs[0] is None
            assert len(output.prompt_logprobs) == len(prompt)
            for place, known in enumerate(output.prompt_logprobs[1:]):
                check_logprobs(known, scores[place], prompt[place + 1], asked.prompt_logprobs)
    assert small.stats().preemptions > 0


def test_a_long_prompt_is_scored_in_parts(
    checkpoint: Checkpoints, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = llm.generate(PROMPTS[4], greedy(prompt_logprobs=1))[0].prompt_logprobs
    monkeypatch.setattr("opweave_engine.runner._SCORED_TOKENS", 7)
    parts = llm.generate(PROMPTS[4], greedy(prompt_logprobs=1))[0].prompt_logprobs
    for one, two in zip(whole[1:], parts[1:], strict=True):
        assert {t: p.logprob for t, p in one.items()} == pytest.approx(
            {t: p.logprob for t, p in two.items()}, abs=1e-5
        )


def test_texts_of_log_probabilities(llm: LLM) -> None:
    (answer,) = answers(llm, PROMPTS[2], greedy(logprobs=1))
    for token, found in zip(answer.token_ids, answer.logprobs, strict=True):
        assert found[token].decoded_token == llm.tokenizer.piece(token)


def test_end_of_text_and_stops_before_min_tokens(llm: LLM) -> None:
    free = answers(llm, PROMPTS[2], greedy())[0].token_ids
    first = free[0]
    (answer,) = answers(llm, PROMPTS[2], greedy(stop_token_ids=[first], max_tokens=20))
    assert (answer.token_ids, answer.text, answer.stop_reason) == ([first], "", first)
    (answer,) = answers(llm, PROMPTS[2], greedy(stop_token_ids=[first], min_tokens=6))
    assert first not in answer.token_ids[:6]
    assert len(answer.token_ids) >= 6
    biased = greedy(logit_bias={EOS: 100}, ignore_eos=False, max_tokens=9)
    (answer,) = answers(llm, PROMPTS[2], biased)
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == ([EOS], "stop", None)
    (answer,) = answers(
        llm, PROMPTS[2], greedy(logit_bias={EOS: 100}, ignore_eos=False, min_tokens=4)
    )
    assert answer.token_ids[4:] == [EOS]
    assert EOS not in answer.token_ids[:4]
    (answer,) = answers(llm, PROMPTS[2], greedy(logit_bias={EOS: 100}, max_tokens=3))
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([EOS] * 3, "", "length")
    shown = greedy(logit_bias={EOS: 100}, max_tokens=3, skip_special_tokens=False)
    assert answers(llm, PROMPTS[2], shown)[0].text == "</s>" * 3


def test_streams_that_are_left_or_overtaken(llm: LLM) -> None:
    wanted = answers(llm, PROMPTS[1], greedy())[0]
    left = llm.stream(PROMPTS[1], greedy())
    next(left)
    overtaken = llm.stream(PROMPTS[1], greedy())
    assert next(overtaken).outputs[0].token_ids == wanted.token_ids[:1]
    left.close()  # type: ignore[attr-defined]
    assert answers(llm, PROMPTS[1], greedy())[0] == wanted
    (last,) = overtaken
    assert last.outputs[0] == wanted
    llm._core.check_idle()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {VOCABULARY: 1}}, rf"logit_bias.*{VOCABULARY}.*0 to {VOCABULARY - 1}"),
        ({"stop_token_ids": [3, 10**9]}, r"stop_token_ids.*1000000000"),
        ({"stop_token_ids": list(range(VOCABULARY)), "min_tokens": 1}, "must leave some"),
        (
            {"stop_token_ids": [i for i in range(VOCABULARY) if i != EOS], "min_tokens": 1,
             "ignore_eos": False},
            "must leave some",
        ),
    ],
)  # fmt: skip
def test_what_the_vocabulary_does_not_have(options: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        llm.generate(PROMPTS[1], greedy(**options))


# Deltas of a request add up to its outputs, however they are merged on the way


TIMINGS = RequestTimings(0.0, 0.0, 0.0)
LOGPROBS = st.one_of(st.none(), st.lists(st.just({5: Logprob(-1.0, 1, "x")}), max_size=8))


@st.composite
def growing(draw: st.DrawFn) -> list[RequestOutput]:
    """Draw the outputs of a request: each holds everything so far."""
    count, wholes = draw(st.integers(1, 3)), []
    for index in range(draw(st.just(count))):
        text, ids = draw(st.text(max_size=20)), draw(st.lists(st.integers(0, 99), max_size=20))
        wholes.append(CompletionOutput(index, text, ids, None, draw(LOGPROBS)))
    prompt_logprobs = draw(LOGPROBS)
    outputs = []
    for share in sorted(draw(st.lists(st.floats(0, 1), min_size=1, max_size=5))):
        parts = [
            replace(
                whole,
                text=whole.text[: int(share * len(whole.text))],
                token_ids=whole.token_ids[: int(share * len(whole.token_ids))],
                logprobs=whole.logprobs and whole.logprobs[: int(share * len(whole.logprobs))],
            )
            for whole in wholes
        ]
        outputs.append(
            RequestOutput("r", "p", [1, 2], parts, False, TIMINGS, prompt_logprobs=prompt_logprobs)
        )
    last = [replace(part, finish_reason="stop", stop_reason=7) for part in outputs[-1].outputs]
    return [*outputs, replace(outputs[-1], outputs=last, finished=True)]


def delta(before: RequestOutput | None, output: RequestOutput) -> RequestOutput:
    """Return what *output* adds to *before*, an earlier output of the same request."""
    if before is None:
        return output
    pairs = list(zip(before.outputs, output.outputs, strict=True))
    return replace(
        output,
        prompt=None,
        prompt_token_ids=[],
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(
                new.index,
                new.text[len(old.text) :],
                new.token_ids[len(old.token_ids) :],
                new.finish_reason if old.finish_reason is None else None,
                new.logprobs and new.logprobs[len(old.logprobs or ()) :],
                new.stop_reason if old.finish_reason is None else None,
            )
            for old, new in pairs
            if new != old
        ],
    )


@given(growing(), st.data())
def test_merged_deltas_add_up_to_the_outputs(
    outputs: list[RequestOutput], data: st.DataObject
) -> None:
    deltas = [delta(old, new) for old, new in zip([None, *outputs], outputs, strict=False)]
    total, start = OutputAccumulator(), 0
    while start < len(deltas):
        end = data.draw(st.integers(start + 1, len(deltas)))
        total.add(merge_deltas(deltas[start:end]))
        assert total.output() == outputs[end - 1]
        start = end


def test_an_accumulated_output_does_not_change_later() -> None:
    first = RequestOutput("r", "p", [1], [CompletionOutput(0, "a", [5], None)], False, TIMINGS)
    total = OutputAccumulator()
    total.add(first)
    early = total.output()
    total.add(replace(first, outputs=[CompletionOutput(0, "b", [6], "stop")], finished=True))
    assert early.outputs == first.outputs
    assert total.output().outputs == [CompletionOutput(0, "ab", [5, 6], "stop")]


PARAMS = [
    SamplingParams(seed=1, max_tokens=9),
    SamplingParams(seed=1, max_tokens=9, n=3, logprobs=2, prompt_logprobs=1),
    SamplingParams(seed=2, max_tokens=20, n=2, stop=["e", "the"], min_tokens=3),
]


def outputs_of(
    core: EngineCore, name: str, params: SamplingParams, *, deltas: bool
) -> list[RequestOutput]:
    core.add_request(core.prepare(name, "Return the", params, deltas=deltas))
    found: list[RequestOutput] = []
    while core.has_unfinished:
        found += core.step()
    return [replace(output, timings=TIMINGS, num_cached_tokens=0) for output in found]


@pytest.fixture(scope="module")
def core(checkpoint: Checkpoints) -> Iterator[EngineCore]:
    core = EngineCore(checkpoint("llama")[0], EngineConfig())
    yield core
    core.shutdown()


@pytest.mark.parametrize("params", PARAMS)
def test_the_deltas_of_an_engine_add_up(core: EngineCore, params: SamplingParams) -> None:
    wanted = outputs_of(core, "a", params, deltas=False)
    total = OutputAccumulator()
    deltas = outputs_of(core, "a", params, deltas=True)
    assert len(deltas) == len(wanted)
    for output, expected in zip(deltas, wanted, strict=True):
        total.add(output)
        assert total.output() == expected
    ends = [each.index for output in deltas for each in output.outputs if each.finish_reason]
    assert sorted(ends) == list(range(params.n))  # each is reported once
    assert all(not output.prompt_token_ids for output in deltas[1:])


def test_the_deltas_of_an_aborted_request(core: EngineCore) -> None:
    core.add_request(core.prepare("a", "Return the", PARAMS[1], deltas=True))
    total = OutputAccumulator()
    for output in core.step():
        total.add(output)
    (last,) = core.abort(["a"])
    total.add(last)
    assert last.finished
    assert [each.finish_reason for each in total.output().outputs] == ["abort"] * 3
    core.check_idle()

"""Deltas of a request add up to its outputs, however they are merged on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tiny_checkpoints import Checkpoints
from opweave.config import EngineConfig
from opweave_engine import (
    CompletionOutput,
    EngineCore,
    Logprob,
    RequestOutput,
    RequestTimings,
    SamplingParams,
)
from opweave_engine.request import OutputAccumulator, merge_deltas

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


def run(
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
    wanted = run(core, "a", params, deltas=False)
    total = OutputAccumulator()
    deltas = run(core, "a", params, deltas=True)
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

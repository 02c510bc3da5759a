"""Sampling against transformers' warpers, and against a reference one token at a time."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from opweave_engine import EngineError, NonFiniteLogitsError, SamplingParams, SamplingParamsError
from opweave_engine.decode_graphs import SequenceStep
from opweave_engine.sampling.history import History
from opweave_engine.sampling.params import RequestSeeds
from opweave_engine.sampling.sampler import (
    Sampler,
    SamplingRequest,
    adjusted,
    cut_distributions,
    derived_seed,
    plain_weights,
    sample,
    uniform,
)
from support.hypothesis_profiles import examples


def warped(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that transformers' ``generate`` draws from."""
    warpers = [TemperatureLogitsWarper(params.temperature)]
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k > 0 else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    warpers += [MinPLogitsWarper(params.min_p)] if params.min_p > 0 else []
    scores = logits.double().unsqueeze(0)
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)[0]


def distributions(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the distribution that opweave samples from, in the order of the vocabulary."""
    full = torch.zeros(logits.shape, dtype=torch.float64)
    plain = [row for row, each in enumerate(params) if not each.cuts]
    cut = [row for row, each in enumerate(params) if each.cuts]
    if plain:
        full[plain] = plain_weights(logits[plain], [params[row] for row in plain])
    if cut:
        for rows, drawn in cut_distributions(logits[cut], [params[row] for row in cut]):
            of_group = [cut[row] for row in rows]
            empty = torch.zeros(len(rows), logits.shape[-1], dtype=torch.float64)
            full[of_group] = empty.scatter(-1, drawn.tokens, drawn.weights)
    return full / full.sum(-1, keepdim=True)


CASES = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(top_k=1),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.9, temperature=2.0),
    SamplingParams(top_k=7, top_p=0.6),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=11, top_p=0.8, min_p=0.1, temperature=1.7),
    SamplingParams(top_k=1000),
    SamplingParams(top_p=1e-9),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distributions_are_those_of_transformers(dtype: torch.dtype) -> None:
    # Every score is another one in bfloat16, too.
    logits = torch.stack([torch.randperm(40) for _ in CASES]).sub(20).div(4).to(dtype)
    got = distributions(logits, CASES)
    for row, params in enumerate(CASES):
        wanted = warped(logits[row], params)
        assert torch.equal(got[row] > 0, wanted > 0), params
        torch.testing.assert_close(got[row], wanted, rtol=1e-6, atol=1e-12)


@examples(200)
@given(
    st.integers(1, 60), st.sampled_from([0.3, 0.8, 1.0, 1.9]), st.integers(-1, 70),
    st.floats(0.01, 1), st.sampled_from([0.0, 0.0, 0.02, 0.3]), st.sampled_from([0.1, 2.0, 9.0]),
)  # fmt: skip
def test_any_parameters_together(
    size: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = spread * torch.randn(1, size)
    # A token within rounding of the limit may fall on either side of it.
    ranked = warped(logits[0], SamplingParams(temperature=temperature, top_k=top_k))
    assume((ranked.sort(descending=True).values.cumsum(0) - top_p).abs().min() > 1e-9)
    wanted = warped(logits[0], params)
    (got,) = distributions(logits, [params])
    assert torch.equal(got > 0, wanted > 0)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-12)


def test_a_large_vocabulary_is_ranked_in_part_and_gives_the_same() -> None:
    params = [
        SamplingParams(top_p=0.99), SamplingParams(top_p=0.5), SamplingParams(min_p=1e-4),
        SamplingParams(min_p=0.2), SamplingParams(top_k=1024), SamplingParams(top_k=1025),
        SamplingParams(top_k=3000, top_p=0.9, min_p=0.3), SamplingParams(top_k=3000, top_p=0.99),
    ]  # fmt: skip
    logits = torch.randn(2 * len(params), 5000)
    logits[::2] *= 5  # one row of each pair is steep, the other one flat
    both = [each for each in params for _ in range(2)]
    got = distributions(logits, both)
    for row, each in enumerate(both):
        wanted = warped(logits[row], each)
        assert torch.equal(got[row] > 0, wanted > 0), each
        torch.testing.assert_close(got[row], wanted, rtol=1e-6, atol=1e-12)
    groups = cut_distributions(logits, both)
    assert [drawn.tokens.shape[-1] for _, drawn in groups] == [1024, 5000]

    requests = [SamplingRequest(each, seed) for seed, each in enumerate(both)]
    alone = [sample(logits[i : i + 1], requests[i : i + 1])[0] for i in range(len(both))]
    assert sample(logits, requests) == alone


@given(
    st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=12),
    st.integers(-1, 14),
    st.sampled_from([0.05, 0.31, 0.77, 0.93, 1.0]),
    st.sampled_from([0.25, 1.0, 1.7]),
)
def test_of_equal_scores_the_lower_token_comes_first(
    logits: list[float], top_k: int, top_p: float, temperature: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, temperature=temperature)
    (got,) = distributions(torch.tensor([logits]), [params])
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[:top_k] if top_k > 0 else order
    weights = [float(np.exp(logits[i] / temperature)) for i in order]
    before = np.cumsum([0, *weights[:-1]]) / sum(weights)
    assume(np.abs(before - top_p).min() > 1e-9)
    kept = sum(top_p == 1 or share < top_p for share in before)
    wanted = np.zeros(len(logits))
    wanted[order[:kept]] = weights[:kept]
    np.testing.assert_allclose(got, wanted / wanted.sum(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("params", CASES[:9], ids=str)
def test_frequencies(params: SamplingParams) -> None:
    logits = 2 * torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    count = 4000
    for requests in (
        [SamplingRequest(params, seed) for seed in range(count)],
        [SamplingRequest(params, 9, place) for place in range(count)],
    ):
        found = np.bincount(sample(logits.expand(count, -1), requests), minlength=12) / count
        wanted = warped(logits[0], params).numpy()
        assert (found[wanted == 0] == 0).all()
        deviation = np.sqrt(wanted * (1 - wanted) / count)
        assert (np.abs(found - wanted) <= 4.5 * deviation + 1e-9).all()


def test_numbers_of_places_are_random() -> None:
    count, bins = 20_000, 50
    for numbers in (
        [uniform(7, place) for place in range(count)],
        [uniform(seed, 0) for seed in range(count)],
        [uniform(derived_seed(3, index), 5) for index in range(count)],
    ):
        assert 0 <= min(numbers) <= max(numbers) < 1
        found = np.bincount((np.array(numbers) * bins).astype(int), minlength=bins)
        chi_square = ((found - count / bins) ** 2 / (count / bins)).sum()
        assert chi_square < 100  # of 49 degrees of freedom: 1 in 40 000 exceeds it
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / np.sqrt(count)
    assert derived_seed(3, 0) == 3
    assert len({derived_seed(3, index) for index in range(128)}) == 128
    assert uniform(2**63 - 1, 2**40) != uniform(2**63 - 1, 2**40 + 1)


def test_a_seed_gives_the_same_tokens_in_every_version() -> None:
    assert [round(uniform(0, place), 6) for place in range(3)] == [0.056466, 0.440083, 0.927895]


def test_greedy_takes_the_best_and_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [9.0, 3.0, 3.0, 2.0]])
    requests = [SamplingRequest(SamplingParams(temperature=0), 0)] * 2
    assert sample(logits, requests) == [1, 0]
    assert sample(logits.bfloat16(), requests) == [1, 0]


def test_greedy_rows_take_nothing_but_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("this takes longer than argmax")

    for slow in ("softmax", "log_softmax", "cumsum", "double", "sort", "topk", "to", "clone"):
        monkeypatch.setattr(Tensor, slow, refuse)
    requests = [SamplingRequest(SamplingParams(temperature=0, top_k=3, top_p=0.5), 0)] * 3
    assert [each.token_id for each in Sampler()(torch.eye(3), requests)] == [0, 1, 2]


def test_other_rows_do_not_change_a_row() -> None:
    logits = torch.randn(8, 50)
    penalized = SamplingParams(temperature=0.9, repetition_penalty=1.5, presence_penalty=1)
    history = History(frozenset([1, 2, 3]))
    history.counts.update([4, 4, 5])
    requests = [
        SamplingRequest(SamplingParams(), 7),
        SamplingRequest(SamplingParams(temperature=0), 7),
        SamplingRequest(SamplingParams(top_k=9, logprobs=3), 7, 4),
        SamplingRequest(SamplingParams(top_p=0.8), 3, 4),
        SamplingRequest(SamplingParams(temperature=1.9, logprobs=0), 11),
        SamplingRequest(SamplingParams(top_k=20, top_p=0.5, min_p=0.01), 11),
        SamplingRequest(penalized, 1, 3, history=history),
        SamplingRequest(SamplingParams(logit_bias={3: 50.0}, top_k=2), 1, 3, (9,)),
    ]
    sampler, before = Sampler(), logits.clone()
    together = sampler(logits, requests)
    alone = [sampler(logits[i : i + 1], requests[i : i + 1])[0] for i in range(len(requests))]
    assert together == alone
    assert sampler(logits.flip(0), requests[::-1]) == alone[::-1]
    assert torch.equal(logits, before)


def test_requests_and_results_can_go_to_another_process() -> None:
    history = History(frozenset([1, 2]))
    history.counts.update([2, 3, 3])
    params = SamplingParams(logit_bias={3: 1.5}, repetition_penalty=1.2, stop="x", logprobs=2)
    request = SamplingRequest(params, 5, 3, (1,), history)
    step = SequenceStep("a", [4], 7, ((1, 2), (3,)), request, [5])
    assert pickle.loads(pickle.dumps(step)) == step
    found = Sampler()(torch.randn(1, 9), [request])
    assert pickle.loads(pickle.dumps(found)) == found
    again = Sampler()(torch.zeros(1, 9), [pickle.loads(pickle.dumps(request))])
    assert again == Sampler()(torch.zeros(1, 9), [request])


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = torch.randn(3, 40)
    logits[0, 5] = logits[0, 9] = logits[0].max()  # of equals, the lower token comes first
    params = [
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=3, top_k=30, logprobs=4, logit_bias={7: 100}),
        SamplingParams(temperature=0, logprobs=20),
    ]
    sampled = Sampler()(logits, [SamplingRequest(each, 1) for each in params])
    wanted = logits.double().log_softmax(-1)
    for row, (one, count) in enumerate(zip(sampled, (0, 4, 20), strict=True)):
        order = sorted(range(40), key=lambda i: (-float(logits[row, i]), i))
        assert [each.token_id for each in one.logprobs][:1] == [one.token_id]
        assert {each.token_id for each in one.logprobs} == {one.token_id, *order[:count]}
        assert len(one.logprobs) == len({each.token_id for each in one.logprobs})
        for each in one.logprobs:
            assert each.logprob == pytest.approx(float(wanted[row, each.token_id]), abs=1e-6)
            assert order[each.rank - 1] == each.token_id
    assert sampled[1].token_id == 7
    assert Sampler()(logits, [SamplingRequest(SamplingParams(), 0)] * 3)[0].logprobs == ()


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[-100.0, 50.0, 49.9]]).expand(50, -1)
    params = SamplingParams(temperature=temperature)
    tokens = sample(logits, [SamplingRequest(params, seed) for seed in range(50)])
    assert set(tokens) == ({1} if temperature < 1 else {0, 1, 2})


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(200, -1)
    for params in (
        SamplingParams(temperature=9.0),
        SamplingParams(top_k=4),
        SamplingParams(min_p=0.1),
    ):
        tokens = sample(logits, [SamplingRequest(params, seed) for seed in range(200)])
        assert set(tokens) == {1, 3}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_scores_that_are_no_numbers(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1] = bad if bad == -torch.inf else logits[1]
    logits[1, 3] = bad
    for params in (SamplingParams(temperature=temperature), SamplingParams(logit_bias={3: -1})):
        with pytest.raises(NonFiniteLogitsError, match="not finite") as error:
            sample(logits, [SamplingRequest(params, 0)] * 3)
        assert error.value.rows == (1,)


# Sampling parameters: defaults, and what is refused


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert params.seed is None
    assert params.stop == ()
    assert not params.ignore_eos
    assert not params.is_greedy
    assert SamplingParams(temperature=0).is_greedy


def test_seeds() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
    seeds = RequestSeeds(0)
    assert [seeds.of(SamplingParams(seed=s)) for s in (5, -2, -(2**63))] == [5, 2**64 - 2, 2**63]
    assert seeds.of(SamplingParams(seed=-1)) != seeds.of(SamplingParams(seed=-1))


@pytest.mark.parametrize(
    "valid",
    [
        {"top_k": -1}, {"top_k": 50}, {"top_p": 1e-6}, {"top_p": 1}, {"max_tokens": 1},
        {"max_tokens": None}, {"seed": 0}, {"seed": 2**63 - 1}, {"seed": -(2**63)}, {"stop": "x"},
        {"stop": ["x", "yz"]}, {"stop": []}, {"temperature": 100.0}, {"ignore_eos": True},
        {"n": 1}, {"n": 128}, {"min_p": 0}, {"min_p": 1.0}, {"min_tokens": 16}, {"logprobs": 0},
        {"logprobs": 20}, {"prompt_logprobs": 3}, {"presence_penalty": -2}, {"logit_bias": None},
        {"frequency_penalty": 2.0}, {"repetition_penalty": 0.1}, {"repetition_penalty": 30},
        {"logit_bias": {}}, {"logit_bias": {5: -100, 0: 100.0}}, {"stop_token_ids": [0, 7]},
        {"skip_special_tokens": False}, {"max_tokens": None, "min_tokens": 900},
    ],
)  # fmt: skip
def test_what_is_allowed(valid: dict[str, Any]) -> None:
    SamplingParams(**valid)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1.5}, {"max_tokens": "3"},
        {"max_tokens": True}, {"temperature": -0.1}, {"temperature": math.nan},
        {"temperature": math.inf}, {"temperature": "hot"}, {"temperature": None}, {"top_p": 0},
        {"top_p": 0.0}, {"top_p": 1.01}, {"top_p": -0.5}, {"top_p": math.nan}, {"top_p": "1"},
        {"top_k": -2}, {"top_k": 2.0}, {"top_k": None}, {"seed": 1.0}, {"seed": 2**63},
        {"seed": -(2**63) - 1}, {"stop": ""}, {"stop": ["a", ""]}, {"stop": [1]}, {"stop": 5},
        {"stop": None}, {"ignore_eos": 1}, {"temperature": True}, {"n": 0}, {"n": 129},
        {"n": True}, {"min_p": -0.1}, {"min_p": 1.1}, {"min_tokens": -1}, {"min_tokens": 17},
        {"logprobs": -1}, {"logprobs": 21}, {"logprobs": True}, {"prompt_logprobs": 1.0},
        {"presence_penalty": 2.1}, {"presence_penalty": None}, {"frequency_penalty": -2.1},
        {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"repetition_penalty": math.inf},
        {"logit_bias": [1]}, {"logit_bias": {-1: 0}}, {"logit_bias": {"1": 0}},
        {"logit_bias": {1: 101}}, {"logit_bias": {1: math.nan}}, {"stop_token_ids": 3},
        {"stop_token_ids": [-1]}, {"stop_token_ids": ["a"]}, {"skip_special_tokens": 0},
        {"temperature": 10**400}, {"repetition_penalty": 10**400}, {"temperature": 10**5000},
        {"max_tokens": -(10**5000)}, {"allowed_token_ids": []}, {"allowed_token_ids": "5"},
        {"allowed_token_ids": [-1]}, {"bad_words": [""]}, {"bad_words": [5]},
        {"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2},
        {"include_stop_str_in_output": 1}, {"spaces_between_special_tokens": None},
    ],
)  # fmt: skip
def test_what_is_refused_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(SamplingParamsError, match=name) as error:
        SamplingParams(**wrong)
    assert error.value.parameter == name
    assert isinstance(error.value, EngineError)
    assert isinstance(error.value, ValueError)


def test_equal_parameters_are_equal() -> None:
    assert SamplingParams(stop="a") == SamplingParams(stop=["a"])
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop=("a",)))


def test_what_is_too_large_is_not_called_too_small() -> None:
    with pytest.raises(SamplingParamsError, match=r"max_tokens=9223372036854775808 must be below"):
        SamplingParams(max_tokens=2**63)


# Penalties, bias and forbidden tokens against transformers' processors and a loop


VOCABULARY = 30
PROMPT, ANSWER = [3, 5, 5, 9], [5, 7, 7, 7, 28]


def request(
    params: SamplingParams,
    prompt: Sequence[int] = PROMPT,
    answer: Sequence[int] = ANSWER,
    **rest: Any,
) -> SamplingRequest:
    history = History.of(prompt, params)
    if history is not None:
        history.counts.update(answer)
    return SamplingRequest(params, 0, len(answer), history=history, **rest)


def logits(rows: int = 1) -> Tensor:
    return 3 * torch.randn(rows, VOCABULARY)


def loop(scores: list[float], params: SamplingParams, ids: Any, forbidden: Any) -> list[float]:
    """One token at a time, as the documentation has it."""
    prompt, answer = ids
    counts = Counter(answer)
    result = []
    for token, given_score in enumerate(scores):
        score = given_score
        if token in prompt or counts[token]:
            penalty = params.repetition_penalty
            score = score / penalty if score > 0 else score * penalty
        score -= params.frequency_penalty * counts[token]
        score -= params.presence_penalty * (counts[token] > 0)
        score += (params.logit_bias or {}).get(token, 0)
        result.append(float("-inf") if token in forbidden else score)
    return result


tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)
requests = st.builds(
    lambda params, prompt, answer, forbidden: (params, (prompt, answer), tuple(forbidden)),
    st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([0.7, 1.0, 1.0, 1.2, 4.0]),
        presence_penalty=st.sampled_from([-2.0, 0.0, 0.0, 0.5]),
        frequency_penalty=st.sampled_from([-0.3, 0.0, 0.0, 2.0]),
        logit_bias=st.none()
        | st.dictionaries(st.integers(0, 29), st.floats(-100, 100), max_size=3),
    ),
    tokens, tokens, st.sets(st.integers(0, VOCABULARY - 1), max_size=3),
)  # fmt: skip


@given(st.lists(requests, min_size=1, max_size=4), st.sampled_from([torch.float32, torch.bfloat16]))
def test_all_together_in_the_order_that_is_documented(rows: list[Any], dtype: torch.dtype) -> None:
    scores = logits(len(rows)).to(dtype)
    before = scores.clone()
    asked = [request(params, *ids, forbidden=forbidden) for params, ids, forbidden in rows]
    got = adjusted(scores, asked)
    wanted = [loop(row, *each) for row, each in zip(scores.tolist(), rows, strict=True)]
    torch.testing.assert_close(
        got.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=1e-5
    )
    assert torch.equal(scores, before)


def test_nothing_asked_is_nothing_done() -> None:
    scores = logits(2)
    assert (
        adjusted(scores, [request(SamplingParams()), request(SamplingParams(temperature=0))])
        is scores
    )


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300])
def test_no_penalty_makes_scores_infinite(penalty: float) -> None:
    scores = torch.tensor([[2.0, -2.0, 0.0, -torch.inf]])
    params = SamplingParams(repetition_penalty=penalty, temperature=0)
    asked = request(params, [0, 1, 2, 3], [])
    assert adjusted(scores, [asked])[0, :3].isfinite().all()
    assert sample(scores, [asked]) == [0]

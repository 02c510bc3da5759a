"""Sampling against an independent reference in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opweave.engine import NonFiniteLogitsError, SamplingParams
from opweave.engine.sampler import SamplingRequest, probabilities, sample


def reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution of the next token, one token at a time."""
    scaled = logits.astype(np.float64) / params.temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = {i: float(np.exp(scaled[i] - scaled[order[0]])) for i in order}
    total, reached = sum(weights.values()), 0.0
    kept: list[int] = []
    for i in order:
        if kept and params.top_p < 1 and reached >= params.top_p:
            break
        kept.append(i)
        reached += weights[i] / total
    result = np.zeros(len(logits))
    for i in kept:
        result[i] = weights[i]
    normalised: np.ndarray = result / result.sum()
    return normalised


def distribution(logits: torch.Tensor, params: list[SamplingParams]) -> np.ndarray:
    weights, tokens = probabilities(logits, params)
    full = torch.zeros_like(weights).scatter(-1, tokens, weights)
    result: np.ndarray = (full / full.sum(-1, keepdim=True)).numpy()
    return result


def draw(logits: torch.Tensor, params: SamplingParams, seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [sample(logits, [SamplingRequest(params, generator)])[0] for _ in range(count)]


CASES = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(top_k=1),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.9, temperature=2.0),
    SamplingParams(top_k=7, top_p=0.6),
    SamplingParams(top_k=1000),
    SamplingParams(top_p=1e-9),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distribution_is_the_reference(dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(len(CASES), 40, generator=torch.Generator().manual_seed(0))).to(dtype)
    got = distribution(logits, CASES)
    for row, params in enumerate(CASES):
        wanted = reference(logits[row].double().numpy(), params)
        assert ((got[row] > 0) == (wanted > 0)).all(), params
        np.testing.assert_allclose(got[row], wanted, rtol=1e-6, atol=1e-12)


@given(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=12),
    st.integers(-1, 14),
    st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.93, 1.0]),
    st.sampled_from([0.25, 1.0, 1.7]),
)
def test_masks_are_exact_with_ties(
    logits: list[float], top_k: int, top_p: float, temperature: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, temperature=temperature)
    got = distribution(torch.tensor([logits]), [params])[0]
    np.testing.assert_allclose(got, reference(np.array(logits), params), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("params", CASES[:6], ids=str)
def test_frequencies(params: SamplingParams) -> None:
    logits = 2 * torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    count = 4000
    rows = logits.expand(count, -1)
    requests = [SamplingRequest(params, torch.Generator().manual_seed(i)) for i in range(count)]
    found = np.bincount(sample(rows, requests), minlength=12) / count
    wanted = reference(logits[0].numpy(), params)
    assert (found[wanted == 0] == 0).all()
    deviation = np.sqrt(wanted * (1 - wanted) / count)
    assert (np.abs(found - wanted) <= 4.5 * deviation + 1e-9).all()


def test_one_generator_gives_the_distribution_over_time() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    found = np.bincount(draw(logits, SamplingParams(), seed=5, count=3000), minlength=3) / 3000
    np.testing.assert_allclose(found, reference(logits[0].numpy(), SamplingParams()), atol=0.03)


def test_greedy_takes_the_best_and_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [9.0, 3.0, 3.0, 2.0]])
    requests = [SamplingRequest(SamplingParams(temperature=0), torch.Generator())] * 2
    assert sample(logits, requests) == [1, 0]
    assert sample(logits.bfloat16(), requests) == [1, 0]


def test_other_rows_do_not_change_a_row() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    params = [
        SamplingParams(seed=7),
        SamplingParams(temperature=0),
        SamplingParams(top_k=9, seed=7),
        SamplingParams(top_p=0.8, seed=3),
        SamplingParams(temperature=1.9),
        SamplingParams(top_k=20, top_p=0.5),
    ]

    def requests() -> list[SamplingRequest]:
        return [SamplingRequest(p, torch.Generator().manual_seed(11)) for p in params]

    together = sample(logits, requests())
    alone = [sample(logits[i : i + 1], [request])[0] for i, request in enumerate(requests())]
    assert together == alone
    reverse = sample(logits.flip(0), requests()[::-1])
    assert reverse == alone[::-1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[-100.0, 50.0, 49.9]])
    tokens = draw(logits, SamplingParams(temperature=temperature), seed=0, count=50)
    assert set(tokens) == ({1} if temperature < 1 else {0, 1, 2})


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    assert set(draw(logits, SamplingParams(temperature=9.0), seed=0, count=200)) == {1, 3}
    assert set(draw(logits, SamplingParams(top_k=4), seed=0, count=200)) == {1, 3}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_scores_that_are_no_numbers(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1] = bad if bad == -torch.inf else logits[1]
    logits[1, 3] = bad
    requests = [SamplingRequest(SamplingParams(temperature=temperature), torch.Generator())] * 2
    with pytest.raises(NonFiniteLogitsError, match="not finite"):
        sample(logits, requests)

"""Penalties, bias and forbidden tokens against transformers' processors and a loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opweave_engine import SamplingParams
from opweave_engine.sampling.history import History
from opweave_engine.sampling.sampler import SamplingRequest, adjusted, sample

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

"""Attention of every provider: nothing but what a query sees reaches its result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ir.workloads import check, each_dtype
from opweave import ir

NAN = math.nan
VARLEN, CAUSAL, PAGED = ir.ops.varlen_attention, ir.ops.causal_attention, ir.ops.paged_attention
each_provider = pytest.mark.parametrize("provider", VARLEN.supported_providers())


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(tokens: int = 7) -> list[Tensor]:
    query = torch.randn(tokens, 4, 8)
    return [query, *torch.randn(2, tokens, 2, 8)]


@pytest.fixture(autouse=True)
def _no_grad(request: pytest.FixtureRequest) -> Any:
    with torch.set_grad_enabled("grad" in request.node.name):
        yield


@each_provider
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_sequence_never_reaches_another(
    provider: str, causal: bool, which: str, bad: float
) -> None:
    """The second of three sequences, and what comes after the last."""
    arguments, cu = packed(9), ints(0, 2, 5, 7)
    attend = VARLEN.using(f"{provider}!")
    clean = attend(*arguments, cu, cu, None, causal)
    spoilt = arguments[("query", "key", "value").index(which)]
    spoilt[3], spoilt[7:] = bad, NAN
    found = attend(*arguments, cu, cu, None, causal)
    for rows in (slice(0, 2), slice(5, 9)):
        assert torch.equal(found[rows], clean[rows])
    if which == "value":
        assert torch.equal(found[2:3], clean[2:3]) == causal
        assert found[4].isclose(torch.tensor(bad), equal_nan=True).all()


@each_provider
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("window", [None, 2])
def test_a_later_token_reaches_none_before_it(
    provider: str, which: str, window: int | None
) -> None:
    """With keys before the queries, as in a chunk of a prompt."""
    query, key, value = packed(20)
    rest = (ints(0, 8, 9), ints(0, 17, 20), None, True, window)
    attend = VARLEN.using(f"{provider}!")
    clean = attend(query[:9], key, value, *rest)
    (key if which == "key" else value)[13] = NAN  # the fifth query's
    found = attend(query[:9], key, value, *rest)
    seen = [4, 5] if window else [4, 5, 6, 7]
    others = [i for i in range(9) if i not in seen]
    torch.testing.assert_close(found[others], clean[others])
    assert found[seen].isnan().all()


def test_what_a_dense_query_does_not_see_adds_nothing_to_native() -> None:
    query, key, value = torch.randn(3, 2, 5, 2, 8)
    clean = CAUSAL.native(query, key, value)
    key[0, 3], value[0, 3, 0, 0] = NAN, NAN
    found = CAUSAL.native(query, key, value)
    assert torch.equal(found[1], clean[1])
    assert torch.equal(found[0, :3], clean[0, :3])
    assert found[0, 3:].isnan().all()


def test_infinite_values_stay_infinite_in_native() -> None:
    query, key, value = torch.randn(3, 1, 4, 1, 8)
    value[0, 1, 0, 0], value[0, 2, 0, 1], value[0, 2, 0, 0] = math.inf, -math.inf, -math.inf
    found = CAUSAL.native(query, key, value)[0, :, 0]
    assert found[0].isfinite().all()
    assert found[1, 0] == math.inf
    assert found[2, 0].isnan()
    assert found[2, 1] == found[3, 1] == -math.inf
    assert found[:, 2:].isfinite().all()


@pytest.mark.parametrize("provider", PAGED.supported_providers())
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_a_cached_sequence_never_reaches_another(provider: str, which: int) -> None:
    caches = torch.randn(2, 4, 2, 16, 8)
    rest = (ints(1, 2)[:, None], ints(3, 5), ints(0, 1, 3))
    attend, query = PAGED.using(f"{provider}!"), torch.randn(4, 4, 8)
    clean = attend(query, *caches, *rest)
    caches[which, 2, :, 4] = NAN  # the last position of the second sequence
    caches[:, 1, :, 3:] = NAN  # after the first sequence
    found = attend(query, *caches, *rest)
    for row in (0, 1, 3):
        if provider == "aten[prompt=1]":  # it repeats such rows by the definition, which rounds
            torch.testing.assert_close(found[row], clean[row])  # sums differently
        else:
            assert torch.equal(found[row], clean[row])
    assert found[2].isnan().all()


@pytest.mark.parametrize("provider", PAGED.supported_providers())
def test_a_used_block_of_a_negative_number_is_no_block(provider: str) -> None:
    arguments = torch.randn(2, 2, 8), *torch.randn(2, 3, 1, 16, 8)
    attend = PAGED.using(f"{provider}!")
    unused = attend(*arguments, ints(1, -1)[None], ints(5), ints(0, 2))
    assert torch.equal(unused, attend(*arguments, ints(1, 0)[None], ints(5), ints(0, 2)))
    for block in (-1, -3, 3):
        with pytest.raises(IndexError if provider == "native" else RuntimeError):
            attend(*arguments, ints(block)[None], ints(5), ints(0, 2))


@each_dtype
@each_provider
@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, -1e-40, 1e-40])
def test_any_scale(provider: str, scale: float, dtype: torch.dtype) -> None:
    for q_len, k_len, window in [(4, 4, None), (4, 6, None), (1, 4, None), (6, 4, 2)]:
        query = torch.randn(2, q_len, 4, 8).to(dtype)
        key, value = torch.randn(2, 2, k_len, 2, 8).to(dtype)
        expected = CAUSAL.native(query, key, value, scale, window)
        check(CAUSAL, CAUSAL.using(f"{provider}!")(query, key, value, scale, window), expected)
        cu = ints(0, q_len), ints(0, k_len)
        rows = VARLEN.using(f"{provider}!")(query[0], key[0], value[0], *cu, scale, True, window)
        check(VARLEN, rows, expected[0])


@each_provider
def test_tokens_of_no_sequence_are_zeros(provider: str) -> None:
    none = ints(0)
    attend = VARLEN.using(f"{provider}!")
    assert torch.equal(attend(*packed(), none, none), torch.zeros(7, 4, 8))
    assert attend(*packed(0), none, none).shape == (0, 4, 8)


@pytest.mark.parametrize("provider", PAGED.supported_providers())
def test_tokens_of_no_cached_sequence_are_zeros(provider: str) -> None:
    caches = torch.randn(2, 3, 2, 16, 8)
    attend = PAGED.using(f"{provider}!")
    found = attend(torch.randn(7, 4, 8), *caches, ints()[:, None].expand(0, 2), ints(), ints(0))
    assert torch.equal(found, torch.zeros(7, 4, 8))


def test_gradients_where_a_hidden_value_is_nan() -> None:
    query, key, value = (t.requires_grad_() for t in packed())
    cu = ints(0, 3, 6)
    with torch.no_grad():
        value[4], value[6] = NAN, NAN
    VARLEN(query, key, value, cu, cu, None, True)[:4].sum().backward()
    for leaf in (query, key, value):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
    alone = [t.detach()[:3].requires_grad_() for t in (query, key, value)]
    VARLEN(*alone, cu[:2], cu[:2], None, True).sum().backward()
    for leaf, own in zip((query, key, value), alone, strict=True):
        torch.testing.assert_close(leaf.grad[:3], own.grad)

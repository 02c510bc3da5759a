"""Which elements views of one storage have in common: no wrong claim, and few open questions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from opweave.ir.donation import coincide, covers, disjoint


def elements(tensor: Tensor) -> set[int]:
    """Where in the storage the elements of a tensor are."""
    places = torch.arange(200).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return set(places.flatten().tolist())


_VIEW = st.tuples(
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
    st.integers(0, 40),
)


@given(first=_VIEW, second=_VIEW)
@example(first=([1, 4], [6, 1, 0], 0), second=([1, 2], [6, 1, 0], 4))  # slices of a single token
@example(first=([3, 4], [8, 1, 0], 6), second=([3, 2], [8, 1, 0], 0))  # rows that wrap around
def test_nothing_is_claimed_wrongly(first: Any, second: Any) -> None:
    base = torch.zeros(200)
    a, b = (base.as_strided(s, d[: len(s)], o) for s, d, o in (first, second))
    shared = elements(a) & elements(b)
    assert not (disjoint(a, b) and shared)
    assert not coincide(a, b) or shared
    assert not covers(a, b) or elements(b) <= elements(a)


@st.composite
def views(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two views of one tensor, each by a few steps such as models take."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    start = draw(st.integers(0, 9))
    base = torch.zeros(200)[start : start + math.prod(shape)].view(shape)

    def view() -> Tensor:
        t = base
        for _ in range(draw(st.integers(0, 4))):
            if not t.ndim or not t.numel():
                break
            dim = draw(st.integers(0, t.ndim - 1))
            size = t.shape[dim]
            step = draw(st.sampled_from(["narrow", "permute", "select", "chunk", "unflatten"]))
            if step == "narrow":
                begin = draw(st.integers(0, size - 1))
                t = t.narrow(dim, begin, draw(st.integers(1, size - begin)))
            elif step == "permute":
                t = t.permute(draw(st.permutations(range(t.ndim))))
            elif step == "select":
                t = t.select(dim, draw(st.integers(0, size - 1)))
            elif step == "chunk":
                t = draw(st.sampled_from(t.chunk(draw(st.integers(1, 3)), dim)))
            elif size % 2 == 0:
                t = t.unflatten(dim, (2, size // 2))
        return t

    return view(), view()


@given(views())
def test_rectangles_of_one_tensor_are_told_apart(pair: tuple[Tensor, Tensor]) -> None:
    a, b = pair
    assert disjoint(a, b) is not bool(elements(a) & elements(b))


def qkv(*shape: int) -> tuple[Tensor, ...]:
    return torch.zeros(*shape, 48).split(16, -1)


def pairs() -> dict[str, tuple[Tensor, Tensor]]:
    q, k, v = qkv(6)
    batched = qkv(2, 6)
    wide = torch.zeros(7, 40)[:, 3:]
    odd = torch.zeros(3, 5)
    caches = torch.zeros(5, 4, 2, 8, 6)
    return {
        "a transposed value": (q, v.view(6, 2, 8).transpose(0, 1)),
        "batches in the layout of attention": (
            batched[0].view(2, 6, 2, 8).transpose(1, 2),
            batched[2].view(2, 6, 2, 8).transpose(1, 2),
        ),
        "row ranges": (q[:3], q[3:]),
        "row ranges of two slices": (q[:3], k[3:]),
        "alternate rows": (wide[::2], wide[1::2]),
        "alternate columns of rows of odd length": (odd[:, ::2], odd[:, 1::2]),
        "rows with gaps": (wide[:3, :4], wide[3:, 2:9]),
        "heads": (q.view(6, 2, 8)[:, 0], k.view(6, 2, 8)[:, 1]),
        "columns of heads": (q.view(6, 2, 8)[..., :4], q.view(6, 2, 8)[..., 4:].permute(2, 0, 1)),
        "caches, head by head": (caches[:, :, 0], caches[:, :, 1].transpose(1, 2)),
        "another dtype": (wide[:, :4].view(torch.int16), wide[:, 4:]),
        "nothing": (q[:0], q),
        "expanded rows": (q[:1].expand(6, 16), k),
    }


@pytest.mark.parametrize("case", pairs())
def test_known_to_be_disjoint(case: str) -> None:
    a, b = pairs()[case]
    assert disjoint(a, b)
    assert disjoint(b, a)
    assert not coincide(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (lambda x: x, lambda x: x[1, 2:3]),
        (lambda x: x[1:], lambda x: x),
        (lambda x: x.view(-1)[9], lambda x: x[:, 4:].t()),
        (lambda x: x[:, :4], lambda x: x[:, 3:].view(torch.int16)),
        (lambda x: x[1:3], lambda x: x[2:4, 1]),
    ],
)
def test_known_to_coincide(a: Any, b: Any) -> None:
    x = torch.zeros(6, 5)
    assert coincide(a(x), b(x))
    assert coincide(b(x), a(x))
    assert not disjoint(a(x), b(x))


def test_interleaved_rows_that_wrap_around_are_an_open_question() -> None:
    memory = torch.zeros(40)
    a, b = (memory.as_strided((3, 3), (7, 3), start) for start in (0, 2))
    assert not elements(a) & elements(b)
    assert not disjoint(a, b)
    assert not coincide(a, b)


def test_covered_elements() -> None:
    x = torch.zeros(6, 5)
    assert covers(x, x.t())
    assert covers(x.t(), x[1:3, ::2])
    assert covers(x[:, 1:4], x[2:, 2:4].t())
    assert not covers(x[:, 1:4], x[2:])
    assert covers(x[1], x[1:1])

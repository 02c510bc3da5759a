"""Thresholds by number of tokens, from measured cells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opweave.tuning import Cell, Measurement, Time
from opweave.tuning.tuning_file import ranges_of

Times = dict[str, float | str]


def cell(tokens: int, times: Times, *, family: str = "f", calls: int = 1, noise: float = 0) -> Cell:
    results = tuple(
        Measurement(p, t) if isinstance(t, str) else Measurement(p, "passed", time=Time(t, noise))
        for p, t in times.items()
    )
    return Cell("op", family, tokens, calls, "a", results)


def chosen(*cells: Cell) -> list[tuple[int | None, str | None]]:
    found = ranges_of(cells, "tuning.json").get("op", [])
    return [(r.limit, r.entries[0].provider if r.entries else None) for r in found]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({1: {"a": 10, "b": 5}, 64: {"a": 10, "b": 5}}, [(None, "b")]),
        ({1: {"a": 10, "b": 10}, 64: {"a": 10, "b": 10}}, []),
        ({1: {"a": 10, "b": 5}, 64: {"a": 10, "b": 20}}, [(1, "b"), (None, None)]),
        ({1: {"a": 10, "b": 20}, 64: {"a": 10, "b": 5}}, [(32, None), (None, "b")]),
        (
            {1: {"a": 9, "b": 5, "c": 8}, 64: {"a": 9, "b": 12, "c": 5}},
            [(1, "b"), (None, "c")],
        ),
        (  # a choice between two measured sizes
            {1: {"a": 9, "b": 10}, 16: {"a": 9, "b": 5}, 256: {"a": 9, "b": 10}},
            [(8, None), (16, "b"), (None, None)],
        ),
        (  # four ranges: the one that saves least is given up
            {
                1: {"a": 100, "b": 50},
                4: {"a": 100, "b": 150},
                16: {"a": 100, "b": 90},
                64: {"a": 100, "b": 150},
                256: {"a": 100, "b": 20},
            },
            [(1, "b"), (128, None), (None, "b")],
        ),
        ({1: {"a": 10, "b": 5}, 64: {"a": 10, "b": "rejected"}}, [(None, "b")]),
        ({1: {"a": 10, "b": 5}, 64: {"a": 10, "b": "failed"}}, []),
        ({1: {"a": 10, "b": 5}, 64: {"a": 10, "b": "crashed"}}, []),
        ({1: {"a": 10, "b": 5, "c": 6}, 64: {"a": 10, "b": "failed"}}, [(None, "c")]),
    ],
)
def test_ranges(times: dict[int, Times], expected: list[tuple[int | None, str | None]]) -> None:
    assert chosen(*(cell(tokens, each) for tokens, each in times.items())) == expected


def test_noise_keeps_the_default() -> None:
    assert chosen(cell(1, {"a": 10, "b": 8}, noise=0.2)) == []


def test_a_choice_may_not_be_slower_for_any_family() -> None:
    fast = cell(4, {"a": 10, "b": 1}, family="f", calls=100)
    assert chosen(fast, cell(4, {"a": 10, "b": 11}, family="g")) == []
    assert chosen(fast, cell(4, {"a": 10, "b": 10}, family="g")) == [(None, "b")]


def test_the_reason_has_both_times() -> None:
    found = ranges_of([cell(1, {"a": 55, "b": 41})], "tuning.json")["op"]
    assert found[0].entries[0].origin == "tuned: 41 µs against 55 µs, tuning.json"
    assert not found[0].entries[0].strict


@given(
    st.dictionaries(
        st.sampled_from([1, 2, 4, 16, 64, 256, 1024]),
        st.tuples(*[st.integers(1, 20)] * 3),
        min_size=1,
    )
)
def test_never_slower_than_the_default_and_at_most_two_thresholds(
    times: dict[int, tuple[int, int, int]],
) -> None:
    cells = [cell(n, dict(zip("abc", found, strict=True))) for n, found in times.items()]
    ranges = chosen(*cells)
    assert len(ranges) <= 3
    limits = [limit for limit, _ in ranges]
    assert limits[:-1] == sorted(set(limits[:-1]))
    assert limits[-1:] in ([], [None])
    for each in cells:
        fitting = [p for limit, p in ranges if limit is None or each.tokens <= limit]
        provider = (fitting or [None])[0] or "a"
        own, usual = each.time(provider), each.time("a")
        assert own is not None
        assert usual is not None
        assert own.microseconds <= usual.microseconds

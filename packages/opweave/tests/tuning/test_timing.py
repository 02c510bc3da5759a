"""Timing with an estimate of its noise."""

from __future__ import annotations

import time

import pytest

from opweave.tuning.timing import Effort, Time, compare, is_faster


def test_the_median_and_its_noise() -> None:
    calls = {"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.004)}
    found = compare(calls, Effort(rounds=5, seconds=0.001))
    assert found["short"].microseconds == pytest.approx(1000, rel=0.9)
    assert found["long"].noise >= 0
    assert is_faster(found["short"], found["long"], least=0)


def test_contenders_take_turns() -> None:
    turns: list[str] = []
    compare({"a": lambda: None, "b": lambda: None}, Effort(rounds=4, seconds=0), turns.append)
    pairs = [tuple(sorted(turns[i : i + 2])) for i in range(0, len(turns), 2)]
    assert pairs == [("a", "b")] * 5  # the first to find out how often to repeat


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Time(10, 0.0), Time(11, 0.0), True),
        (Time(10, 0.0), Time(10.1, 0.0), False),  # below the least difference
        (Time(10, 0.1), Time(11, 0.1), False),  # within the noise
        (Time(10, 0.1), Time(13, 0.1), True),
        (Time(10, 0.0), Time(9, 0.0), False),
        (Time(10, float("inf")), Time(99, 0.0), False),  # one round tells nothing
    ],
)
def test_faster_by_more_than_the_noise(one: Time, other: Time, expected: bool) -> None:
    assert is_faster(one, other) is expected

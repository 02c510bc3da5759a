"""Stop strings in text that arrives in pieces: what was shown stays."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from opweave_engine.detokenizer import Detokenizer, IncrementalDecoder

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


class Pieces(IncrementalDecoder):
    """Stands for a decoder: token i is the i-th piece."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces, self.rest = pieces, rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return self.rest


def cut(text: str, data: Any) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    return [text[a:b] for a, b in pairwise(cuts)]


def may_still_stop(seen: str, stop: list[str]) -> int:
    """How many characters at the end of *seen* some text to come can turn into a stop string."""
    starts = [i for i in range(len(seen)) if any(s.startswith(seen[i:]) for s in stop)]
    return len(seen) - min(starts, default=len(seen))


@given(st.text("ab", max_size=20), STOPS, st.data())
def test_the_first_stop_string_cuts(text: str, stop: list[str], data: Any) -> None:
    pieces = cut(text, data)
    completion = Detokenizer(Pieces(pieces), stop)
    seen = sent = ""
    for token, piece in enumerate(pieces):
        completion.push(token)
        seen, sent = seen + piece, sent + completion.take()
        assert sent == completion.text
        found = sorted((seen.index(s), -len(s), s) for s in stop if s in seen)
        assert completion.is_stopped == bool(found)
        if found:
            assert completion.text == seen[: found[0][0]]
            assert completion.stopped_by == found[0][2]
            return
        assert completion.text == seen[: len(seen) - may_still_stop(seen, stop)]
    completion.finish()
    assert sent + completion.take() == completion.text == text
    assert (completion.stopped_by, completion.take()) == (None, "")


@given(st.text("ab", max_size=20), STOPS, st.integers(0, 6), st.data())
def test_text_only_grows(text: str, stop: list[str], min_tokens: int, data: Any) -> None:
    pieces = cut(text, data)
    completion = Detokenizer(Pieces(pieces), stop, min_tokens=min_tokens)
    before = ""
    for token in range(len(pieces)):
        completion.push(token)
        assert completion.text.startswith(before)
        before = completion.text
        if completion.is_stopped:
            assert token + 1 >= min_tokens
            break
    completion.finish()
    assert completion.text.startswith(before)


def test_a_stop_string_that_comes_too_early_is_text() -> None:
    completion = Detokenizer(Pieces(["a", "b!", "c", "xa", "b", "z"]), ["ab"], min_tokens=3)
    texts = []
    for token in range(5):
        completion.push(token)
        texts.append(completion.text)
    assert texts == ["", "ab!", "ab!c", "ab!cx", "ab!cx"]
    assert completion.stopped_by == "ab"


def test_the_rest_may_stop_too() -> None:
    completion = Detokenizer(Pieces(["a"], rest="b!"), ["b"])
    completion.push(0)
    completion.finish()
    assert (completion.text, completion.stopped_by) == ("a", "b")


def test_what_was_held_back_comes_at_the_end() -> None:
    completion = Detokenizer(Pieces(["xa"], rest="a"), ["aab"])
    completion.push(0)
    assert completion.text == "x"
    completion.finish()
    assert (completion.text, completion.is_stopped) == ("xaa", False)


def test_long_stop_strings_cost_no_more_than_the_text() -> None:
    size = 200_000
    completion = Detokenizer(Pieces(["a" * 1000, "c"]), ["a" * size + "b", ("ab" * size)[:size]])
    started = time.process_time()
    for _ in range(1000, size + 1000, 1000):
        completion.push(0)
        assert not completion.text
    completion.push(1)
    assert completion.text == "a" * size + "c"
    assert time.process_time() - started < 5  # a quadratic search takes minutes

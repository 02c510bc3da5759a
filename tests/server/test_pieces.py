"""Pieces of a growing answer add up to it, and hold nothing that is taken back."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from opweave.engine import CompletionOutput, Logprob
from opweave.engine.tokenization.detokenizer import Detokenizer
from opweave.engine.tokenization.incremental_decoder import IncrementalDecoder
from opweave.server.pieces import Growth

TEXTS = st.text("abc", max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=3)


class Texts(IncrementalDecoder):
    """Stands for a decoder: every token is *piece*."""

    def __init__(self, piece: str = "") -> None:
        self.piece = piece

    def push(self, token_id: int) -> str:
        return self.piece


@given(TEXTS, STOPS, st.lists(st.integers(1, 6)))
def test_pieces_add_up_to_the_text_before_the_stop(
    text: str, stops: list[str], steps: list[int]
) -> None:
    ends = [text.find(stop) for stop in stops if stop in text]
    final = text[: min(ends)] if ends else text
    decoder = Texts()
    completion, growth, sent, length = Detokenizer(decoder, stops), Growth(), "", 0
    for step in steps:
        decoder.piece = text[length : length + step]
        length += step
        shown = text[:length]
        if any(stop in shown for stop in stops) or length >= len(text):
            break
        completion.push(0)
        piece = growth.piece(CompletionOutput(0, completion.text, list(range(length)), None))
        sent += piece.text
        assert final.startswith(sent)
        # Nothing is held back without need: it is the beginning of a stop string.
        held = shown[len(sent) :]
        assert not held or any(stop.startswith(held) for stop in stops)
    last = growth.piece(CompletionOutput(0, final, list(range(len(text))), "stop"))
    assert sent + last.text == final
    assert last.finish_reason == "stop"


def test_long_stop_strings_cost_no_more_than_the_text() -> None:
    size = 200_000
    decoder = Texts("a" * 1000)
    completion = Detokenizer(decoder, ["a" * size + "b", ("ab" * size)[:size]])
    started = time.process_time()
    for _ in range(1000, size + 1000, 1000):
        completion.push(0)
        assert not completion.text
    decoder.piece = "c"
    completion.push(0)
    assert completion.text == "a" * size + "c"
    assert time.process_time() - started < 5  # a quadratic search takes minutes


def test_a_stop_string_that_does_not_stop_is_sent() -> None:
    decoder, growth, sent = Texts(), Growth(), ""
    completion = Detokenizer(decoder, ["aba"], min_tokens=5)
    for piece in ("a", "b", "a", "b", "x"):
        decoder.piece = piece
        completion.push(0)
        sent += growth.piece(CompletionOutput(0, completion.text, [], None)).text
    assert sent == "ababx"


def test_tokens_and_their_logprobs_come_once() -> None:
    growth = Growth()
    known = [{7: Logprob(-1.0, 1, "a")}, {8: Logprob(-2.0, 1, "b")}, {9: Logprob(-3.0, 2, "c")}]
    first = growth.piece(CompletionOutput(0, "a", [7], None, known[:1]))
    rest = growth.piece(CompletionOutput(0, "abc", [7, 8, 9], "length", known))
    assert (first.token_ids, rest.token_ids) == ([7], [8, 9])
    assert (first.logprobs, rest.logprobs) == (known[:1], known[1:])


def test_the_end_of_an_answer_comes_once() -> None:
    growth, answer = Growth(), CompletionOutput(0, "a", [7], "stop", None, "b")
    piece = growth.piece(answer)
    assert (piece.finish_reason, piece.stop_reason) == ("stop", "b")
    again = growth.piece(answer)  # while another answer goes on
    assert not again
    assert (again.finish_reason, again.stop_reason) == (None, None)


def test_a_token_without_text_is_no_piece() -> None:
    growth = Growth()
    assert not growth.piece(CompletionOutput(0, "", [5], None))
    assert growth.piece(CompletionOutput(0, "é", [5, 6], None)).text == "é"
    assert growth.piece(CompletionOutput(0, "é", [5, 6, 1], "stop"))

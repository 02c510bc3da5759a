"""The places of tokens are those in the text that they add up to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opweave_engine import Checkpoint, Tokenizer
from opweave_engine.server.logprobs import Offsets, prompt_offsets
from server.fake_engine import CHECKPOINT

TOKENIZER = Tokenizer(Checkpoint(CHECKPOINT))
SPECIAL = sorted(TOKENIZER.special_ids)


@given(st.text("aé—x🙂 \n", min_size=1))
def test_tokens_of_a_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    places = prompt_offsets(TOKENIZER, ids, text)
    assert len(places) == len(ids)
    rest = [(i, place) for i, place in zip(ids, places, strict=True) if i not in SPECIAL]
    # Between the beginnings of two tokens there is the text of the first.
    ends = [place for _, place in rest[1:]] + [len(text)]
    for (token, place), end in zip(rest, ends, strict=True):
        piece = TOKENIZER.piece(token)
        assert "\ufffd" in piece or text[place:end] == piece


def test_bytes_of_one_character_begin_where_it_does() -> None:
    ids = [i for i in TOKENIZER.encode("é—x") if i not in SPECIAL]
    places = prompt_offsets(TOKENIZER, ids, "é—x")
    assert places == sorted(places)
    assert set(places) == {0, 1, 2}
    assert places[-1] == 2


@pytest.mark.parametrize("text", ["x", "<s>x", "<s>x</s>y"])
def test_special_tokens_count_where_the_text_has_them(text: str) -> None:
    ids = TOKENIZER.encode(text)
    places = prompt_offsets(TOKENIZER, ids, text)
    x = TOKENIZER.encode("x", add_special_tokens=False)[0]
    assert places[ids.index(x)] == text.index("x")
    assert places[0] == 0
    assert places[-1] == len(text) - 1


@given(st.lists(st.integers(0, 2047), max_size=24), st.data())
def test_pieces_of_an_answer_have_the_places_of_the_whole(
    ids: list[int], data: st.DataObject
) -> None:
    whole, parts, found = Offsets(TOKENIZER, [5]), Offsets(TOKENIZER, [5]), []
    rest = list(ids)
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        found += parts.add(rest[:count])
        del rest[:count]
    assert found == whole.add(ids)
    assert found == sorted(found)

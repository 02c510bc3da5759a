"""Text to tokens and back, whole and piece by piece."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from models.tiny_checkpoints import EOS, VOCABULARY, Checkpoints, write_tokenizer
from opweave_engine import Checkpoint, CheckpointError, MissingDependencyError, Tokenizer
from opweave_engine.detokenizer import Detokenizer, IncrementalDecoder
from opweave_engine.errors import TokenizerError
from support.hypothesis_profiles import examples

TEXTS = ["", "the quick dog", "naïve façade", "東京 🙂", "a\n\n b\tc", "</s>the<s>"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(Checkpoint(directory))


@pytest.mark.parametrize("text", TEXTS)
def test_as_transformers(text: str, directory: Path, tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "work",
    [
        lambda tokenizer: tokenizer.encode("the quick dog " * 50_000),
        lambda tokenizer: tokenizer.decode(list(range(3, VOCABULARY)) * 1000),
    ],
    ids=["encode", "decode"],
)
def test_other_threads_run_while_a_long_text_is_read(
    tokenizer: Tokenizer, work: Callable[[Tokenizer], object]
) -> None:
    ended: list[float] = []

    def run() -> None:
        work(tokenizer)
        ended.append(time.perf_counter())

    worker = threading.Thread(target=run)
    worker.start()
    ticks = []
    while worker.is_alive():
        time.sleep(0.001)
        ticks.append(time.perf_counter())
    worker.join()
    # One at most if it held the interpreter; a busy machine has few turns to give.
    assert sum(tick < ended[0] for tick in ticks) > 3


@examples(50)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=30), st.text(max_size=12))
@example([98] * 30, "")
def test_pieces_add_up(tokenizer: Tokenizer, ids: list[int], text: str) -> None:
    for tokens in (ids, tokenizer.encode(text) + ids, ids + tokenizer.encode(text)):
        decoder = IncrementalDecoder(tokenizer)
        pieces = [decoder.push(token) for token in tokens]
        assert "".join(pieces) + decoder.finish() == tokenizer.decode(tokens)
        known, shown = b"", ""
        for token, piece in zip(tokens, pieces, strict=True):
            # Only the bytes of an incomplete character are held back.
            if token not in tokenizer.special_ids:
                known += tokenizer.bytes_in_text(token)
            shown += piece
            assert shown == known[: len(known) - incomplete(known)].decode(errors="replace")


def test_a_continuation_is_decoded_behind_its_prompt(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    words = {"<unk>": 0, "\u2581the": 1, "\u2581dog": 2, "s": 3}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(Checkpoint(tmp_path))
    assert IncrementalDecoder(tokenizer).push(2) == "dog"
    decoder = IncrementalDecoder(tokenizer, [1])
    assert [decoder.push(2), decoder.push(3), decoder.push(1)] == [" dog", "s", " the"]
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.bos_token_id is None


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_config", "expected"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 8}, {"eos_token": "</s>"}, {7, 8, EOS}),
        ({"eos_token_id": [7, 9]}, {}, {}, {7, 9}),
        ({"eos_token_id": None}, {"eos_token_id": [8]}, {}, {8}),
        (None, {"eos_token_id": 8}, {"eos_token": "</s>"}, {8, EOS}),
        (None, {}, {"eos_token": "</s>"}, {EOS}),
        (None, None, {"eos_token": {"content": "</s>", "lstrip": False}}, {EOS}),
        # A named token that tokenizer.json lacks is added, as in transformers.
        (None, None, {"eos_token": "<nothing>"}, {VOCABULARY}),
        ({}, {}, None, set()),
        ({"eos_token_id": True}, {"eos_token_id": 8}, None, {8}),
        ({"eos_token_id": "7"}, {"eos_token_id": [8, "9"]}, {"eos_token": "</s>"}, {EOS}),
    ],
)
def test_end_of_text(
    generation: Any, config: Any, tokenizer_config: Any, expected: set[int], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    for name, content in [
        ("generation_config", generation),
        ("config", config),
        ("tokenizer_config", tokenizer_config),
    ]:
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert Tokenizer(Checkpoint(tmp_path)).eos_token_ids == expected


def test_end_of_text_that_is_no_token_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "generation_config.json"
    for value in ("7", True, [True], 1.0):
        file.write_text(json.dumps({"eos_token_id": value}))
        caplog.clear()
        Tokenizer(Checkpoint(tmp_path))
        assert f"{file}: eos_token_id={value!r} is ignored" in caplog.text
    file.write_text('{"eos_token_id": null}')
    caplog.clear()
    Tokenizer(Checkpoint(tmp_path))
    assert not caplog.text


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer.json"):
        Tokenizer(Checkpoint(tmp_path))
    for content in (b"", b"{", b"[]", b"\xff"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(TokenizerError, match=r"tokenizer.json is damaged"):
            Tokenizer(Checkpoint(tmp_path))
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("nonsense")
    with pytest.raises(CheckpointError, match=r"generation_config.json"):
        Tokenizer(Checkpoint(tmp_path))


@pytest.mark.parametrize("name", ["tokenizers", "safetensors"])
def test_missing_dependencies(
    name: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opweave_engine import LLM

    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"pip install opweave-engine"):
        LLM(checkpoint("llama")[0])


BYTES = st.binary(max_size=8)
TEXT = st.text("a\ufffd\u00e9\u6f22\U0001f642", max_size=8)


@examples(200)
@given(st.builds(lambda *parts: b"".join(parts), BYTES, TEXT.map(str.encode), BYTES), st.data())
def test_only_text_behind_the_prompt_is_new(tokenizer: Tokenizer, text: bytes, data: Any) -> None:
    of_bytes = {tokenizer.bytes_of(token): token for token in range(VOCABULARY) if token > 2}
    cut = data.draw(st.integers(0, len(text)))
    prompt, answer = ([of_bytes[bytes([b])] for b in part] for part in (text[:cut], text[cut:]))
    decoder = IncrementalDecoder(tokenizer, prompt)
    new = "".join(map(decoder.push, answer)) + decoder.finish()
    begun = text[cut - incomplete(text[:cut]) : cut]
    expected = (begun + text[cut:]).decode(errors="replace")
    if begun and not any(is_character(begun + text[cut : cut + more]) for more in (1, 2, 3)):
        expected = expected[1:]  # the prompt shows it
    assert new == expected


def incomplete(text: bytes) -> int:
    """How many bytes at the end of *text* some bytes after it can make a character."""
    ends = [
        count
        for count in (1, 2, 3)
        for rest in (b"\x80", b"\xbf")
        for more in (1, 2, 3)
        if count <= len(text) and is_character(text[-count:] + rest * more)
    ]
    return max(ends, default=0)


def is_character(text: bytes) -> bool:
    try:
        return len(text.decode()) == 1
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize(
    "text", ["x\ufffd\u6f22y", "\ufffd\ufffd", "\u6f22\U0001f642", "\u6f22" * 5]
)
@pytest.mark.parametrize("stray", [b"", b"\xff"])
def test_replacement_characters_and_tokens_of_one_byte(
    text: str, stray: bytes, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    words = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"x": 256, "y": 257}
    backend = Backend(models.BPE(words, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(Checkpoint(tmp_path))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    before = [*stray, words["y"]]
    for count in range(len(ids) + 1):
        decoder = IncrementalDecoder(tokenizer, [*before, *ids[:count]])
        complete = len(b"".join(map(tokenizer.bytes_in_text, ids[:count])).decode(errors="ignore"))
        pieces = [decoder.push(token) for token in ids[count:]]
        assert "".join(pieces) + decoder.finish() == text[complete:]
        assert decoder.finish() == ""


@examples(50)
@given(st.lists(st.sampled_from([65, *range(256, 263)]), max_size=20))
def test_tokens_of_whole_characters_are_decoded_once(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int]
) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    words = ["a", "\u2581", "\u2581a", "\u2581\u2581b", "\u6f22", "\ufffd", "c\u2581"]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    path = tmp_path_factory.mktemp("bytes")
    backend.save(str(path / "tokenizer.json"))
    tokenizer = Tokenizer(Checkpoint(path))
    for prompt in ([256], [257], [258, 262]):
        decoder = IncrementalDecoder(tokenizer, prompt)
        text = "".join(map(decoder.push, [*ids, 258])) + decoder.finish()
        assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *ids, 258])
    decoder = IncrementalDecoder(tokenizer, [256])
    with patch.object(tokenizer, "decode") as decode:
        assert decoder.push(258) == " a"  # it was decoded before
        assert not decode.called


def test_a_space_between_special_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["decoder"] = None  # tokens are joined with spaces
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(Checkpoint(tmp_path))
    ids = [EOS, EOS, 300, EOS]
    word = tokenizer.piece(300).strip()
    for spaces, expected in [(True, f"</s> </s> {word} </s>"), (False, f"</s></s> {word} </s>")]:
        decoder = IncrementalDecoder(
            tokenizer, skip_special_tokens=False, spaces_between_special_tokens=spaces
        )
        assert "".join(map(decoder.push, ids)) == expected


def test_a_long_text_is_decoded_as_a_short_one(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Return the list. " * 500)
    assert len(ids) > 2000
    assert tokenizer.decode(ids) == "Return the list. " * 500
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<s>Return")


@pytest.mark.parametrize("text", ["漢字 é", "🙂\u00a0a\n"])
def test_the_bytes_of_tokens(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = [tokenizer.bytes_of(token) for token in ids]
    assert b"".join(part or b"?" for part in parts) == text.encode()
    assert any("\ufffd" in tokenizer.piece(token) for token in ids)
    assert tokenizer.bytes_of(EOS) == b"</s>"


def test_the_text_of_one_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for token in range(VOCABULARY):
        if "\ufffd" not in (alone := tokenizer.decode([token], skip_special_tokens=False)):
            assert tokenizer.piece(token) == alone
    assert tokenizer.piece(EOS) == "</s>"
    assert "".join(map(tokenizer.piece, tokenizer.encode("a b", add_special_tokens=False))) == "a b"


# Stop strings in text that arrives in pieces: what was shown stays


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

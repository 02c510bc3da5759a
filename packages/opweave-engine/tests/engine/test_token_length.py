"""How many characters a token stands for: a bound that no text breaks, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from opweave_engine import Checkpoint
from opweave_engine import Tokenizer as OwnTokenizer
from opweave_engine.tokenizer import longest_token
from support import ROOT

TINY = ROOT / "examples" / "models" / "tiny-pydoc"
BYTES = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}
TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n\ta\u0301\u0327\u1100\u1161")
    )
)


def byte_level(**options: Any) -> Tokenizer:
    """Bytes, and two that are merged."""
    vocabulary = {**BYTES, "aa": 256, "aaaa": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "a"), ("aa", "aa")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, value in options.items():
        setattr(tokenizer, name, value)
    return tokenizer


def fallback(**options: Any) -> Tokenizer:
    """Characters as sentencepiece has them, and bytes for those that are unknown."""
    vocabulary = {**FALLBACK, "<unk>": 256, "\u2581": 257, "a": 258, "\u2581a": 259}
    merges = [("\u2581", "a")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    for name, value in options.items():
        setattr(tokenizer, name, value)
    return tokenizer


def with_added(token: AddedToken) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([token])
    return tokenizer


def truncated() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    return tokenizer


KNOWN: dict[str, tuple[Callable[[], Tokenizer], int]] = {
    "bytes": (byte_level, 4),
    "composed": (lambda: byte_level(normalizer=normalizers.NFC()), 16),
    "shortened": (lambda: byte_level(normalizer=normalizers.Replace("aab", "b")), 12),
    "cut": (
        lambda: byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(r"\s+"), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        ),
        4,
    ),
    "with an added token": (lambda: with_added(AddedToken("[a long one]")), 12),
    "byte fallback": (fallback, 6),
}
UNKNOWN: dict[str, Callable[[], Tokenizer]] = {
    "words": lambda: Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    "unknown characters": lambda: Tokenizer(
        models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>")
    ),
    "dropped characters": lambda: Tokenizer(models.BPE({"a": 0}, [])),
    "dropped spaces": lambda: byte_level(pre_tokenizer=pre_tokenizers.Whitespace()),
    "removed parts": lambda: byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(False)]
        )
    ),
    "bytes that are missing": lambda: byte_level(model=models.BPE({"a": 0}, [])),
    "stripped text": lambda: byte_level(normalizer=normalizers.Strip()),
    "replaced patterns": lambda: byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "deleted text": lambda: byte_level(normalizer=normalizers.Replace("a", "")),
    "spaces of an added token": lambda: with_added(AddedToken("[x]", lstrip=True)),
    "truncation": truncated,
}


@pytest.mark.parametrize("name", KNOWN)
def test_no_text_breaks_the_bound(name: str) -> None:
    make, expected = KNOWN[name]
    tokenizer = make()
    assert longest_token(tokenizer) == expected

    @given(TEXTS)
    def check(text: str) -> None:
        for each in (text, text * 40, f"{'a' * 64}{text}{' ' * 64}"):
            assert len(each) <= expected * len(tokenizer.encode(each).ids)

    check()


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_there_is_no_bound(name: str) -> None:
    assert longest_token(UNKNOWN[name]()) is None


def test_of_a_checkpoint() -> None:
    tokenizer = OwnTokenizer(Checkpoint(TINY))
    assert tokenizer.longest_token == 17
    text = (TINY / "config.json").read_text() * 3
    assert len(text) <= 17 * len(tokenizer.encode(text, add_special_tokens=False))

"""Tokenizers of GGUF files give the ids of the tokenizers that the files were made from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from engine.gguf_files import finish, put
from opweave_engine import CheckpointError, TokenizerError
from opweave_engine.load.checkpoint import Checkpoint
from opweave_engine.tokenizer import Tokenizer as Ours

TEXTS = [
    "",
    "Hello world",
    "trailing spaces   ",
    "one  two\n\n\nthree\t\tfour\r\nfive",
    "I'm sure they'LL say we've 12345 reasons, or 6,789.01",
    "Größe, naïve façade — 東京: café and cafe\u0301",
    "😀👩‍👩‍👧 ﬁ ² ½ ⅷ ٣ \u00a0\u2003",
    "<s>user</s> <tool> x<s>",
    "def f(x):\n    return x ** 2  # square\n",
    "camelCaseWords HTTPServer",
]
CORPUS = ["the quick brown fox didn't jump over 123 lazy dogs — Größe, café 東京\n\n  x = y "] * 30
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def split(pattern: str) -> Any:
    step = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([step, BYTES])


# The pre-tokenizers of Llama 3, Qwen 2, SmolLM2 and GPT-2, as their tokenizer.json has them.
KINDS = {
    "llama-bpe": split(WORDS + r"|\p{N}{1,3}" + REST),
    "qwen2": split(WORDS + r"|\p{N}" + REST),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "gpt-2": GPT2,
}
SPECIAL = ["<s>", "</s>"]


def trained(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    tokenizer.pre_tokenizer, tokenizer.decoder = KINDS[kind], decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def write(path: Path, add: Callable[[GGUFWriter], None], architecture: str = "llama") -> Path:
    writer = GGUFWriter(path, architecture)
    add(writer)
    for key in ("embedding_length", "feed_forward_length", "block_count", "context_length"):
        writer.add_uint32(f"{architecture}.{key}", 4)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sliding_window(4)
    for name in ("token_embd", "blk.0.attn_q", "blk.0.attn_k", "blk.0.ffn_down"):
        writer.add_tensor(f"{name}.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    return path


def add_bpe(writer: GGUFWriter, kind: str, tokenizer: Tokenizer) -> None:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    types = {**dict.fromkeys(SPECIAL, 3), "<tool>": 4}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list([text for text, _ in vocabulary])
    writer.add_token_types([types.get(text, 1) for text, _ in vocabulary])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


@pytest.mark.parametrize("kind", KINDS)
def test_bpe_of_bytes(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = trained(kind)

    def add(writer: GGUFWriter) -> None:
        add_bpe(writer, kind, theirs)
        writer.add_add_bos_token(False)

    ours = Ours(Checkpoint(write(tmp_path / "model.gguf", add)))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, False)
    assert ours.special_ids == {0, 1}
    assert (ours.bos_token_id, ours.eos_token_ids) == (0, {1})
    assert "pre-tokenizer" not in caplog.text


# llama.cpp's LLAMA_VOCAB_PRE_TYPE_DEFAULT, each applied to the parts that the ones before left.
DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def parts_of(text: str) -> list[str]:
    parts = [text]
    for pattern in DEFAULT:
        parts = [p for part in parts for p in regex.split(f"({pattern})", part) if p]
    return parts


@pytest.mark.parametrize("kind", [None, "default"])
def test_files_that_do_not_name_the_splits(
    kind: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = trained("gpt-2")

    def add(writer: GGUFWriter) -> None:
        add_bpe(writer, "default", theirs)
        if kind is None:
            del writer.kv_data[0]["tokenizer.ggml.pre"]

    ours = Ours(Checkpoint(write(tmp_path / "model.gguf", add)))
    theirs.pre_tokenizer = BYTES
    for text in [*TEXTS[:7], "1234567 x+=y <= 3 ~", *TEXTS[8:]]:  # without special tokens
        expected = [theirs.encode(part).ids for part in parts_of(text)]
        assert ours.encode(text) == [*itertools.chain(*expected)], text
    (warning,) = [r.getMessage() for r in caplog.records if "pre-tokenizer" in r.msg]
    assert "tokens may differ from those of the model's training" in warning


@pytest.mark.parametrize(
    ("kind", "flag", "expected"),
    [("llama-bpe", None, [0]), ("llama-bpe", False, []), ("gpt-2", None, []), ("gpt-2", True, [0])],
)
def test_the_token_that_begins_a_text(
    kind: str, flag: bool | None, expected: list[int], tmp_path: Path
) -> None:
    def add(writer: GGUFWriter) -> None:
        add_bpe(writer, kind, trained(kind))
        if flag is not None:
            writer.add_add_bos_token(flag)

    ours = Ours(Checkpoint(write(tmp_path / "model.gguf", add)))
    assert ours.encode("") == expected
    assert ours.encode("x", add_special_tokens=False) == ours.encode("x")[len(expected) :]


PIECES = ["▁the", "▁t", "he", "in", "▁in", "▁x", "an", "▁an", "and", "▁and", "er", "▁re", "on"]


def add_pieces(writer: GGUFWriter, *, prefix: bool = True) -> None:
    """Add a SentencePiece vocabulary: special tokens, bytes, pieces, characters."""
    letters = [chr(c) for c in range(33, 127)] + ["▁", "é", "東"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *letters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) + len(letters))]
    writer.add_tokenizer_model("llama")
    # Only Gemma has tokens of several spaces.
    more = ["<tool>", *(["  ", "    "] if not prefix else [])]
    writer.add_token_list([*tokens, *more])
    writer.add_token_types([*types, *[4] * len(more)])
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES) + len(letters) + len(more))]
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)


@pytest.mark.parametrize(("architecture", "prefix"), [("llama", True), ("gemma3", False)])
def test_sentence_piece(architecture: str, prefix: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", lambda w: add_pieces(w, prefix=prefix), architecture)
    ours = Ours(Checkpoint(path))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in ["the rain in Spain", *TEXTS[1:]]:
        if architecture == "llama" and "<" in text:
            continue  # transformers adds no space after a special token; llama.cpp does
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_a_space_follows_a_special_token(tmp_path: Path) -> None:
    ours = Ours(Checkpoint(write(tmp_path / "model.gguf", add_pieces)))
    the = 259
    assert ours.encode("the</s>the") == [1, the, 2, the]


def test_every_end_of_an_answer(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(
            ["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "a", "b", "ab"]
        )
        writer.add_token_types([3, 3, 1, 3, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(0)
        writer.add_eot_token_id(2)
        writer.add_chat_template("{{ messages }}")

    checkpoint = Checkpoint(write(tmp_path / "model.gguf", add))
    assert Ours(checkpoint).eos_token_ids == {0, 1, 2, 3}


TOKENS = {"tokens": ["a", "b"]}
BPE = {"model": "gpt2", **TOKENS, "merges": ["a b"]}
PIECE = {"model": "llama", **TOKENS, "scores": [0.0, 1.0]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model='t5', which is not supp"),
        ({"model": [1, 2]}, "tokenizer.ggml.model=.1, 2.; it must be a string"),
        ({"model": "gpt2", "merges": ["a b"]}, "has no list of strings tokenizer.ggml.tokens"),
        ({**BPE, "tokens": [1, 2]}, "has no list of strings tokenizer.ggml.tokens"),
        ({"model": "gpt2", **TOKENS}, "has no list tokenizer.ggml.merges"),
        ({**BPE, "merges": ["a b", "ab"]}, "has the merge 'ab', which is not a pair"),
        ({"model": "llama", **TOKENS}, "has no tokenizer.ggml.scores"),
        ({**BPE, "pre": "chameleon"}, "pre='chameleon', which is not supported. Supported: def"),
        ({**BPE, "bos_token_id": 2}, "bos_token_id=2, but 2 tokens"),
        ({**PIECE, "token_type": [1] * 3}, "no tokenizer.ggml.token_type with a number for each"),
        ({**PIECE, "add_space_prefix": [1, 2]}, "add_space_prefix=.1, 2.; it must be a boolean"),
        ({**PIECE, "bos_token_id": [1, 2]}, "bos_token_id=.1, 2.; it must be an integer"),
    ],
)
def test_damaged_and_unsupported(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        for key, value in values.items():
            put(writer, f"tokenizer.ggml.{key}", value)

    with pytest.raises((TokenizerError, CheckpointError), match=message) as raised:
        Ours(Checkpoint(write(tmp_path / "model.gguf", add)))
    assert "\n" not in str(raised.value)

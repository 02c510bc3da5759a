"""Files next to tokenizer.json mean what they mean to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from models.tiny_checkpoints import BOS, EOS, VOCABULARY, write_tokenizer
from opweave_engine import ChatTemplate, Checkpoint, Tokenizer

TEXTS = ["<s>the</s> <image>dog", "a<eot>b <extra> c", "the  quick\n<new>dog <image> <pad>"]
NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token", "image_token")
TEMPLATE = "".join(f"[{{{{ {name} }}}}]" for name in NAMES)
TOKEN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
# The file and its content; None: without it.
CASES: dict[str, dict[str, Any]] = {
    "named in special_tokens_map.json": {
        "tokenizer_config.json": {},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {**TOKEN, "content": "</s>"}},
    },
    "without tokenizer_config.json": {
        "tokenizer_config.json": None,
        "special_tokens_map.json": {"bos_token": "<s>"},
    },
    "both files differ": {"tokenizer_config.json": {"bos_token": "<pad>", "eos_token": "</s>"},
                          "special_tokens_map.json": {"bos_token": "<s>", "eos_token": None}},
    "special_tokens_map.json and added_tokens_decoder": {
        "tokenizer_config.json": {
            "eos_token": "</s>",
            "added_tokens_decoder": {"2": {**TOKEN, "content": "</s>", "special": True}},
        },
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": "<pad>"},
    },
    "extra tokens in a list": {
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "extra_special_tokens": ["<image>", "<extra>"],
        },
    },
    "extra tokens by their older name": {
        "tokenizer_config.json": {"additional_special_tokens": ["<image>", "<eot>"]},
    },
    "extra tokens in special_tokens_map.json": {
        "tokenizer_config.json": {"extra_special_tokens": ["<image>"]},
        "special_tokens_map.json": {
            "extra_special_tokens": ["<extra>", {**TOKEN, "rstrip": True, "content": "<eot>"}]
        },
    },
    "older extra tokens in special_tokens_map.json": {
        "tokenizer_config.json": {"bos_token": "<s>"},
        "special_tokens_map.json": {"additional_special_tokens": ["<extra>", "<eot>"]},
    },
    "extra tokens by name": {
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "extra_special_tokens": {"image_token": "<image>", "boi_token": "<extra>"},
        },
    },
    "another named token": {
        "tokenizer_config.json": {"image_token": "<image>", "mask_token": "<extra>"},
    },
    "a named token that tokenizer.json lacks": {
        "tokenizer_config.json": {"bos_token": "<new>", "eos_token": "</s>"},
    },
    "added_tokens_decoder": {
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "added_tokens_decoder": {
                "320": {**TOKEN, "content": "<image>", "special": True},
                "321": {**TOKEN, "content": "<eot>", "normalized": True, "special": False},
                "3": {**TOKEN, "content": "<unk>", "special": False},
            },
        },
    },
    "added_tokens.json": {
        "tokenizer_config.json": {"bos_token": "<s>", "extra_special_tokens": ["<extra>"]},
        "added_tokens.json": {"<image>": 320, "<extra>": 321, "<s>": 1},
    },
    "split_special_tokens": {
        "tokenizer_config.json": {"bos_token": "<s>", "split_special_tokens": True},
    },
    "add_bos_token": {"tokenizer_config.json": {"bos_token": "<s>", "add_bos_token": False}},
}  # fmt: skip


def write(path: Path, files: dict[str, Any]) -> Path:
    write_tokenizer(path)
    (path / "special_tokens_map.json").unlink(missing_ok=True)
    for name, content in files.items():
        if content is None:
            (path / name).unlink(missing_ok=True)
            continue
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
        given = {**kind, **content} if name == "tokenizer_config.json" else content
        (path / name).write_text(json.dumps(given))
    if files.get("tokenizer_config.json", {}) is None:  # by which transformers finds the class
        (path / "config.json").write_text('{"model_type": "llama"}')
    return path


@pytest.mark.parametrize("case", CASES)
def test_as_transformers(case: str, tmp_path: Path) -> None:
    path = write(tmp_path, CASES[case])
    theirs, ours = AutoTokenizer.from_pretrained(path), Tokenizer(Checkpoint(path))
    for text in TEXTS:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special) == ids
        for skips in (True, False):
            decoded = theirs.decode(ids, skip_special_tokens=skips)
            assert ours.decode(ids, skip_special_tokens=skips) == decoded
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == {theirs.eos_token_id} - {None}


@pytest.mark.parametrize("case", CASES)
def test_chat_templates_know_the_tokens(case: str, tmp_path: Path) -> None:
    path = write(tmp_path, CASES[case])
    (path / "chat_template.jinja").write_text(TEMPLATE)
    messages = [{"role": "user", "content": "Hello"}]
    expected = AutoTokenizer.from_pretrained(path).apply_chat_template(messages, tokenize=False)
    own, given = ChatTemplate.of(Checkpoint(path)), ChatTemplate.given(TEMPLATE, Checkpoint(path))
    assert own.render(messages) == given.render(messages) == expected


def with_padding(path: Path) -> Path:
    write_tokenizer(path)
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.enable_padding(length=16, pad_id=0, pad_token="<pad>", direction="left")
    backend.enable_truncation(8, stride=2)
    backend.save(str(path / "tokenizer.json"))
    return path


def test_padding_and_truncation_are_disabled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = with_padding(tmp_path)
    theirs = AutoTokenizer.from_pretrained(path)
    caplog.set_level("INFO", "opweave_engine")
    ours = Tokenizer(Checkpoint(path))
    for text in ("", "dog", "the quick brown fox jumps over the lazy dog " * 10):
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert len(ours.encode("the lazy dog " * 10)) > 16
    assert ours.piece(BOS) == "<s>"
    assert ours.longest_token is not None
    assert [record.message.partition("=")[0] for record in caplog.records] == [
        "tokenizer.json: padding",
        "tokenizer.json: truncation",
    ]


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("wanted", [True, False, None])
def test_settings_that_are_not_followed_are_logged(
    wanted: bool | None, adds_bos: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path, adds_bos=adds_bos)
    config = {"bos_token": "<s>", "add_bos_token": wanted, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(Checkpoint(tmp_path))
    assert (tokenizer.encode("dog")[0] == BOS) is adds_bos
    noted = [record.message for record in caplog.records]
    if wanted in (None, adds_bos):
        assert not noted
    else:
        (message,) = noted
        assert f"add_bos_token={wanted} is not followed" in message
    caplog.clear()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "add_eos_token": true}')
    Tokenizer(Checkpoint(tmp_path))
    assert "add_eos_token=True is not followed" in caplog.text
    assert "does not add it" in caplog.text


def test_ids_that_differ_between_files_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path)
    token = {**TOKEN, "content": "<image>", "special": True}
    config = {"eos_token": "</s>", "added_tokens_decoder": {"400": token}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(Checkpoint(tmp_path))
    assert tokenizer.encode("<image>")[-1] == VOCABULARY
    assert "'<image>' has the id 400" in caplog.text
    assert str(VOCABULARY) in caplog.text
    assert tokenizer.eos_token_ids == {EOS}


def test_a_token_that_is_special_only_next_to_tokenizer_json(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken("<call>", special=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert Tokenizer(Checkpoint(tmp_path)).decode([VOCABULARY]) == "<call>"
    token = {**TOKEN, "content": "<call>", "special": True}
    config = {"added_tokens_decoder": {str(VOCABULARY): token}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(Checkpoint(tmp_path)).decode([VOCABULARY]) == ""

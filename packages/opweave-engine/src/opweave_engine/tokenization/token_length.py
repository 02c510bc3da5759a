"""The maximum number of characters that one token can stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from opweave_engine.dependencies import require

# By how much a normalizer can shorten a text. Unicode composes a character of at most four.
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1}
# Pre-tokenizers that cut, and leave nothing out; others may drop any amount of white space.
_CUTTERS = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}
_CUTTERS_UNLESS_REMOVING = {"Split", "Punctuation"}
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


def longest_token(backend: Any) -> int | None:
    """Return the maximum number of characters that one token of *backend* represents.

    None if it is unbounded: a part of the tokenizer drops characters, or maps any number of them to
    one token, such as an unknown word.

    Args:
        backend: a ``tokenizers.Tokenizer``.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True).keys()
    added = backend.get_added_tokens_decoder().values()
    shrinks = _shrinks(described(backend.normalizer))
    if (
        not vocabulary
        or shrinks is None
        or backend.truncation is not None
        or any(token.lstrip or token.rstrip for token in added)
        or not _covers(described(backend.pre_tokenizer), backend.model, vocabulary)
    ):
        return None
    return shrinks * max(map(len, vocabulary))


def described(part: Any) -> dict[str, Any]:
    """Return what ``tokenizer.json`` says of a part."""
    found: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return found


def _shrinks(normalizer: Mapping[str, Any]) -> int | None:
    if not normalizer:
        return 1
    if normalizer["type"] == "Sequence":
        product = 1
        for each in normalizer["normalizers"]:
            if (factor := _shrinks(each)) is None:
                return None
            product *= factor
        return product
    if normalizer["type"] == "Replace":
        old, new = normalizer["pattern"].get("String"), normalizer["content"]
        return -(-len(old) // len(new)) if old and new else None
    return _NORMALIZERS.get(normalizer["type"])


def _covers(pre_tokenizer: Mapping[str, Any], model: Any, vocabulary: AbstractSet[str]) -> bool:
    """Whether every character becomes a part of a token that has it in its text, or more."""
    if type(model).__name__ != "BPE" or not _keeps(pre_tokenizer):
        return False
    if model.byte_fallback and vocabulary >= _BYTES:
        return True
    alphabet: list[str] = require("tokenizers.pre_tokenizers").ByteLevel.alphabet()
    return _has_bytes(pre_tokenizer) and vocabulary >= set(alphabet)


def _keeps(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(map(_keeps, pre_tokenizer["pretokenizers"]))
    is_kept = pre_tokenizer.get("behavior") != "Removed"
    return kind is None or kind in _CUTTERS or (kind in _CUTTERS_UNLESS_REMOVING and is_kept)


def _has_bytes(pre_tokenizer: Mapping[str, Any]) -> bool:
    return pre_tokenizer.get("type") == "ByteLevel" or any(
        map(_has_bytes, pre_tokenizer.get("pretokenizers", ()))
    )

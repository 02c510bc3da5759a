"""The bytes of tokens in byte-level and byte-fallback vocabularies."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from typing import Any

# GPT-2 writes a byte as a character that can be seen: as itself, or as one of those from U+0100 on.
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = sorted(set(range(256)).difference(_VISIBLE))
_ALPHABET = {
    **{chr(byte): byte for byte in _VISIBLE},
    **{chr(0x100 + place): byte for place, byte in enumerate(_HIDDEN)},
}
REPLACEMENT = "\ufffd"  # stands for bytes that are not valid UTF-8
_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")


def token_bytes(token: str, decoder: Mapping[str, Any]) -> bytes | None:
    r"""Return the bytes of *token*, or None if the vocabulary is not one of bytes.

    Args:
        token: as the vocabulary writes it.
        decoder: what ``tokenizer.json`` says of the decoder.

    Examples:
        >>> token_bytes("æ¼", {"type": "ByteLevel"})
        b'\xe6\xbc'
        >>> token_bytes("<0xE6>", {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]})
        b'\xe6'
    """
    if is_byte_level(decoder) and _ALPHABET.keys() >= set(token):
        return bytes(map(_ALPHABET.__getitem__, token))
    if has_byte_tokens(decoder) and (found := _ONE_BYTE.fullmatch(token)):
        return bytes.fromhex(found[1])
    return None


def is_byte_level(decoder: Mapping[str, Any]) -> bool:
    """Return whether every token stands for bytes, as in GPT-2."""
    return "ByteLevel" in _kinds(decoder)


def has_byte_tokens(decoder: Mapping[str, Any]) -> bool:
    """Return whether some tokens stand for one byte each, as in Llama 2."""
    return not is_byte_level(decoder) and "ByteFallback" in _kinds(decoder)


def incomplete_end(text: bytes, *, is_strict: bool = False) -> bytes:
    r"""Return the bytes of an incomplete UTF-8 character at the end of *text*.

    Args:
        text: UTF-8, possibly with invalid bytes before the end.
        is_strict: return ``b""`` if there are invalid bytes.

    Examples:
        >>> incomplete_end("a漢".encode()[:-1])
        b'\xe6\xbc'
        >>> incomplete_end(b"\xff")
        b''
    """
    decoder = codecs.getincrementaldecoder("utf-8")("strict" if is_strict else "replace")
    try:
        decoder.decode(text)
    except UnicodeDecodeError:
        return b""
    left = decoder.getstate()[0]
    # CPython keeps the beginning of a surrogate, too, which is not a character.
    return left if len(left.decode(errors="replace")) == 1 else b""


def completes(begun: bytes, following: bytes) -> bool:
    """Return whether *following* begins with the rest of the UTF-8 character *begun*."""
    length = 2 if begun[0] < 0xE0 else 3 if begun[0] < 0xF0 else 4
    try:
        return len((begun + following)[:length].decode()) == 1
    except UnicodeDecodeError:
        return False


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    for each in decoder.get("decoders", [decoder]):
        yield each.get("type", "")

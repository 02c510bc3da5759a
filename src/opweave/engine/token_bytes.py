"""The bytes that a token of a vocabulary of bytes stands for."""

from __future__ import annotations

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
_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")


def token_bytes(token: str, decoder: Mapping[str, Any]) -> bytes | None:
    """Return the bytes of *token*, or None if the vocabulary is not one of bytes.

    Args:
        token: as the vocabulary writes it.
        decoder: what ``tokenizer.json`` says of the decoder.

    Examples:
        >>> token_bytes("æ¼", {"type": "ByteLevel"})
        b'\\xe6\\xbc'
        >>> token_bytes("<0xE6>", {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]})
        b'\\xe6'
    """
    kinds = set(_kinds(decoder))
    if "ByteLevel" in kinds and _ALPHABET.keys() >= set(token):
        return bytes(map(_ALPHABET.__getitem__, token))
    if "ByteFallback" in kinds and (found := _ONE_BYTE.fullmatch(token)):
        return bytes.fromhex(found[1])
    return None


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    for each in decoder.get("decoders", [decoder]):
        yield each.get("type", "")

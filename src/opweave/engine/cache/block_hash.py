"""Hashes of blocks of tokens; equal hashes mean equal blocks and equal tokens before them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_SIZE = 16  # bytes: collisions are out of the question, even if somebody looks for them


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
    """Append the missing hashes of the full blocks of *token_ids* to *hashes*.

    Each hash covers the previous hash and the block's tokens.
    """
    for end in range((len(hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        before = hashes[-1] if hashes else b""
        tokens = array("q", token_ids[end - block_size : end]).tobytes()
        hashes.append(blake2b(before + tokens, digest_size=_SIZE).digest())

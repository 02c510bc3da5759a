"""Hashes of blocks of tokens; equal hashes mean that the salt and all tokens up to there match."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_SIZE = 16  # bytes: collisions are out of the question, even if somebody looks for them


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: str | None = None
) -> None:
    """Append the missing hashes of the full blocks of *token_ids* to *hashes*.

    Each hash covers the previous hash and the block's tokens; the first one covers the salt.
    """
    for end in range((len(hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        before = hashes[-1] if hashes else _root(cache_salt)
        tokens = array("q", token_ids[end - block_size : end]).tobytes()
        hashes.append(blake2b(before + tokens, digest_size=_SIZE).digest())


def _root(cache_salt: str | None) -> bytes:
    """Return the bytes that stand for the hash of the block before the first one."""
    if cache_salt is None:
        return b""
    # A client chooses the salt. The personalization keeps its hash apart from those of blocks, so
    # that no salt stands for the tokens of another request.
    salt = cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(salt, digest_size=_SIZE, person=b"cache_salt").digest()

"""Stateless random numbers: hashes of a seed and a position."""

from __future__ import annotations

from hashlib import blake2b


def uniform(seed: int, place: int) -> float:
    """Return the random number for *seed* and *place*, uniformly distributed over [0, 1).

    Equal arguments give the same number in any process.

    Args:
        seed: from 0 to 2**64 - 1.
        place: from 0 to 2**64 - 1.
    """
    return (_hashed(seed, place) >> 11) * 2.0**-53


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of one of several answers; the first one uses *seed*."""
    return seed if index == 0 else _hashed(seed, index, b"answer") >> 1


def _hashed(seed: int, number: int, purpose: bytes = b"") -> int:
    content = seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    return int.from_bytes(blake2b(content, digest_size=8, person=purpose).digest(), "little")

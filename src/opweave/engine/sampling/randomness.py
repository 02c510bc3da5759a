"""Random numbers that belong to a place, so that nobody has to remember a generator's state."""

from __future__ import annotations

from hashlib import blake2b


def uniform(seed: int, place: int) -> float:
    """Return the number of a place, evenly distributed over [0, 1).

    A hash: any process gives the same number, as often as it is asked, in any order.

    Args:
        seed: from 0 to 2**64 - 1.
        place: as the seed.
    """
    return (_hashed(seed, place) >> 11) * 2.0**-53


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of one of several answers; the first one has the seed itself."""
    return seed if index == 0 else _hashed(seed, index, b"answer") >> 1


def _hashed(seed: int, number: int, purpose: bytes = b"") -> int:
    content = seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    return int.from_bytes(blake2b(content, digest_size=8, person=purpose).digest(), "little")

"""Incremental stop-string matcher."""

from __future__ import annotations


class StopMatcher:
    """Tracks how much of a stop string the text so far ends with.

    Uses the failure function of Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM
    J. Comput. 6 (1977), so that each character takes amortized constant time.

    Args:
        stop: the stop string, not empty.
    """

    def __init__(self, stop: str) -> None:
        self._stop, self._fallback = stop, [0]
        self._length = 0
        for character in stop[1:]:
            self._fallback.append(self._next(self._fallback[-1], character))

    def read(self, text: str) -> int:
        """Add *text*, and return the length of the longest proper prefix that it now ends with."""
        for character in text:
            self._length = self._next(self._length, character)
            if self._length == len(self._stop):
                self._length = self._fallback[-1]
        return self._length

    def _next(self, length: int, character: str) -> int:
        while length and self._stop[length] != character:
            length = self._fallback[length - 1]
        return length + (self._stop[length] == character)

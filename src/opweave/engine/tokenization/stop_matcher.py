"""How much of a text a growing text ends with."""

from __future__ import annotations


class StopMatcher:
    """How much of the beginning of *whole* a growing text ends with; never all of it.

    By the failure function of Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM J.
    Comput. 6 (1977): every character is looked at a constant number of times, however long *whole*.
    """

    def __init__(self, whole: str) -> None:
        self._whole, self._shorter = whole, [0]
        self._length = 0
        for character in whole[1:]:
            self._shorter.append(self._next(self._shorter[-1], character))

    def read(self, text: str) -> int:
        """Return the length after *text* has been added."""
        for character in text:
            self._length = self._next(self._length, character)
            if self._length == len(self._whole):
                self._length = self._shorter[-1]
        return self._length

    def _next(self, length: int, character: str) -> int:
        while length and self._whole[length] != character:
            length = self._shorter[length - 1]
        return length + (self._whole[length] == character)

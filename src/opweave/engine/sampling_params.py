"""How to choose the tokens of one request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from opweave.engine.errors import SamplingParamsError


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop.

    Attributes:
        max_tokens: stop after this many; None: at the end of the context.
        temperature: divides the scores; 0 always takes the best token.
        top_p: sample among the most likely tokens that together reach this probability.
        top_k: sample among this many most likely tokens; 0 or -1: all.
        seed: makes the request's tokens reproducible; None: the engine draws one.
        stop: one or more texts that end the request; none of them is part of its text.
        ignore_eos: go on after an end-of-text token.

    Raises:
        SamplingParamsError: a value is out of range or of the wrong type.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _stop_texts(self.stop))
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, "or None for no limit")
        _check_number("temperature", self.temperature, 0.0, math.inf)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise SamplingParamsError("top_p=0 leaves no token; it must be above 0, and at most 1.")
        _check_int("top_k", self.top_k, -1, "where 0 and -1 mean all tokens")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, "or None")
        if not isinstance(self.ignore_eos, bool):
            raise SamplingParamsError(f"ignore_eos={self.ignore_eos!r} is neither True nor False.")

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature == 0


def _check_int(name: str, value: object, least: int, note: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise SamplingParamsError(
            f"{name}={value!r} must be an integer of at least {least}, {note}."
        )


def _check_number(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or value == math.inf:  # type: ignore[operator]
        limit = "finite" if high == math.inf else f"at most {high:g}"
        raise SamplingParamsError(
            f"{name}={value!r} must be a number of at least {low:g}, {limit}."
        )


def _stop_texts(stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise SamplingParamsError(f"stop={stop!r} must be a string or a list of strings.")
    if "" in texts:
        raise SamplingParamsError("stop holds an empty string, which every text contains.")
    return tuple(texts)

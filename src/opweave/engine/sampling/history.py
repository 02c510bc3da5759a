"""The tokens that penalties look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from opweave.engine.sampling.sampling_params import SamplingParams


@dataclass(slots=True)
class History:
    """Which tokens a prompt has, and how often its answer has each.

    Attributes:
        prompt: every token of the prompt.
        counts: of the tokens of the answer.
    """

    prompt: frozenset[int]
    counts: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, prompt: Sequence[int], params: SamplingParams) -> History | None:
        """Return that of an answer which begins, or None if *params* penalise nothing."""
        return cls(frozenset(prompt)) if params.penalises else None

    @property
    def tokens(self) -> frozenset[int]:
        """Every token of prompt and answer."""
        return self.prompt | self.counts.keys()

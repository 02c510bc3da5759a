"""The tokens that penalties apply to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from opweave_engine.sampling.sampling_params import SamplingParams


@dataclass(slots=True)
class History:
    """The tokens of a prompt, and the token counts of its output.

    Attributes:
        prompt: all tokens of the prompt.
        counts: how often the output has each token.
    """

    prompt: frozenset[int]
    counts: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, prompt: Sequence[int], params: SamplingParams) -> History | None:
        """Return the history of a new output, or None if *params* set no penalty."""
        return cls(frozenset(prompt)) if params.penalizes else None

    @property
    def tokens(self) -> frozenset[int]:
        """All tokens of the prompt and the output."""
        return self.prompt | self.counts.keys()

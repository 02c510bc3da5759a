"""Seeds for requests without one."""

from __future__ import annotations

import torch

from opweave_engine.sampling.sampling_params import SamplingParams


class RequestSeeds:
    """Draws a reproducible sequence of seeds for requests without one.

    Args:
        seed: the engine's seed.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def of(self, params: SamplingParams) -> int:
        """Return the seed of a request: its own, or the next one."""
        if params.seed is not None:
            return params.seed % 2**64
        return int(torch.randint(2**63 - 1, (), generator=self._generator))

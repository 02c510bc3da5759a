"""The sampler: tokens are chosen on the host."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from acme_device.engine.usage import usage
from opweave_engine.sampling.sampler import Sampled, Sampler, SamplingRequest


class AcmeSampler(Sampler):
    """Moves the scores to the host, once, and chooses tokens there.

    The device has no kernels for sorting and drawing. Each would run on the host anyway, and take
    the scores there and back every time.
    """

    def __call__(self, logits: Tensor, requests: Sequence[SamplingRequest]) -> list[Sampled]:
        usage.sampled_tokens += len(requests)
        return super().__call__(logits.cpu(), requests)

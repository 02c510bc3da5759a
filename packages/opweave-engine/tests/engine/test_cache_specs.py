"""Every layer of a model has a place of its own in the cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement

import pytest
import torch
from torch import nn

from opweave.layers import DuplicateLayerError, StatefulLayer
from opweave_engine.attention import (
    FullAttentionSpec,
    LatentAttentionSpec,
    SlidingWindowSpec,
    cache_specs,
)
from opweave_engine.models import Attention, LatentAttention


class Recurrent(StatefulLayer):
    """A layer with a state."""

    def __init__(self) -> None:
        super().__init__("mixer")
        self.state_shapes = {"conv": (3,)}


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "full": lambda layer: Attention(layer, 4, 2, 8),
    "window": lambda layer: Attention(layer, 4, 2, 8, window=5),
    "latent": lambda layer: LatentAttention(layer, 4, 24),
}


def test_what_is_kept_is_found_by_the_index() -> None:
    model = nn.ModuleList(build(i) for i, build in enumerate(LAYERS.values()))
    assert cache_specs(model, torch.bfloat16) == {
        0: FullAttentionSpec(2, 8, 8, torch.bfloat16),
        1: SlidingWindowSpec(2, 8, 8, torch.bfloat16, 5),
        2: LatentAttentionSpec(24, torch.bfloat16),
    }


@pytest.mark.parametrize("kinds", [*combinations_with_replacement(LAYERS, 2)])
def test_two_layers_of_one_index_are_named(kinds: tuple[str, str]) -> None:
    first, second = (LAYERS[kind](3) for kind in kinds)
    model = nn.ModuleDict({"first": first, "second": second})
    message = r"^first and second are both layer 3 to the cache, .* index or prefix of its own\.$"
    with pytest.raises(DuplicateLayerError, match=message):
        cache_specs(model, torch.float32)


def test_two_layers_with_states_of_one_name_are_named() -> None:
    model = nn.ModuleList(Recurrent() for _ in range(2))
    with pytest.raises(DuplicateLayerError, match=r"^0 and 1 are both layer 'mixer' to the cache"):
        cache_specs(model, torch.float32)

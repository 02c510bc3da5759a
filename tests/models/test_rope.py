"""The table of cosines and sines against the formulas, computed one angle at a time."""

from __future__ import annotations

import math

import pytest
import torch

from opweave.models import RopeConfig
from opweave.models.rope import RotaryEmbedding

LLAMA3 = RopeConfig("llama3", 500000.0, 8.0, 1.0, 4.0, 8192)


def frequency(config: RopeConfig, pair: int, head_dim: int) -> float:
    plain: float = 1 / config.theta ** (2 * pair / head_dim)
    if config.rope_type == "linear":
        return plain / config.factor
    if config.rope_type == "default":
        return plain
    wavelength = 2 * math.pi / plain
    if wavelength < config.original_max_positions / config.high_freq_factor:
        return plain
    if wavelength > config.original_max_positions / config.low_freq_factor:
        return plain / config.factor
    smooth = (config.original_max_positions / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    return (1 - smooth) * plain / config.factor + smooth * plain


@pytest.mark.parametrize(
    "config", [RopeConfig(), RopeConfig("linear", 5e3, 4.0), LLAMA3], ids=lambda c: c.rope_type
)
@pytest.mark.parametrize("head_dim", [8, 128])
def test_table(config: RopeConfig, head_dim: int) -> None:
    rotary = RotaryEmbedding(config, head_dim, 50, dtype=torch.float32, device="cpu")
    for position in (0, 1, 49):
        angles = [position * frequency(config, pair, head_dim) for pair in range(head_dim // 2)]
        row = [*map(math.cos, angles), *map(math.sin, angles)]
        torch.testing.assert_close(
            rotary.cos_sin_cache[position], torch.tensor(row), atol=1e-5, rtol=0
        )


def test_table_is_rounded_once() -> None:
    exact = RotaryEmbedding(LLAMA3, 64, 50, dtype=torch.float32, device="cpu")
    rounded = RotaryEmbedding(LLAMA3, 64, 50, dtype=torch.bfloat16, device="cpu")
    assert torch.equal(rounded.cos_sin_cache, exact.cos_sin_cache.bfloat16())


def test_table_is_not_a_weight() -> None:
    assert not RotaryEmbedding(LLAMA3, 8, 4, dtype=torch.float32, device="cpu").state_dict()

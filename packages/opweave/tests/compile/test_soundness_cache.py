"""Random programs over a paged cache: compiled and eager agree, with any fusion and donation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import opweave.compile
from opweave import ir

from .conftest import all_native, compiled

HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
T, HEADS, KV_HEADS, SIZE = 6, 4, 2, 16
WIDTHS = (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)
TABLE = torch.cat((torch.linspace(0, 9, 96).cos(), torch.linspace(0, 9, 96).sin())).view(12, 16)
# Of unit variance: a larger one makes attention sharp, and two layers of that magnify float32's
# rounding a thousandfold, so that native itself is off from float64 by more than what is allowed.
PROJECTION = torch.randn(WIDTHS[0], sum(WIDTHS), generator=torch.Generator().manual_seed(0)) / 8
SCALE = torch.tensor([0.02])
TABLES = torch.tensor([[3, 1]], dtype=torch.int32)
LENGTHS = torch.tensor([20], dtype=torch.int32)
STARTS = torch.tensor([0, T], dtype=torch.int32)
SLOTS = torch.tensor([14, 15, 16, 17, -1, 19]) % 16 + torch.tensor([48, 48, 16, 16, 0, 16])
SLOTS[4] = -1
o = ir.ops


@dataclass(frozen=True)
class Layer:
    """One layer: a projection, a rotation, a write, and attention over what is written."""

    sliced: bool  # the heads are slices of the projection
    by_heads: bool
    is_neox: bool
    donates: bool  # the heads, and the caches where the program has copied them
    queries: str  # how they are used: after the write, before it as well, or seen otherwise
    keeps_keys: bool  # the rotated keys are a result
    reads_old_cache: bool
    quantizes: str  # how, in the last layer
    options: tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """A function of hidden states and two caches."""

    layers: tuple[Layer, ...]
    copies: bool

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        if self.copies:
            keys, values = keys * 1.5, values * 1.5
        for layer in self.layers[:-1]:
            y, keys, values = self._layer(layer, x, keys, values, found)
            x = y.flatten(1).cos()
        layer = self.layers[-1]
        y, keys, values = self._layer(layer, x, keys, values, found)
        if layer.quantizes in ("flat", "both"):
            found.append(o.static_quant_fp8(y.reshape(T, -1), SCALE))
        if layer.quantizes == "heads":
            found.append(o.static_quant_fp8(y, SCALE))
        if layer.quantizes in ("no", "both"):
            found.append(y)
        return (*found, keys, values)

    def _layer(
        self, layer: Layer, x: Tensor, keys: Tensor, values: Tensor, found: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = (x @ PROJECTION).split(WIDTHS, -1)
        if not layer.sliced:
            heads = tuple(t + 0.5 for t in heads)
        if layer.by_heads:
            heads = tuple(torch.unflatten(t, -1, (-1, SIZE)) for t in heads)
        q, k, v = heads
        rotate = o.rotary_embedding.maybe_inplace if layer.donates else o.rotary_embedding
        given_up = layer.donates and self.copies and not layer.reads_old_cache
        write = o.reshape_and_cache.maybe_inplace if given_up else o.reshape_and_cache
        q, k = rotate(q, k, torch.arange(T) * 2, TABLE, SIZE, layer.is_neox)
        if layer.queries == "before":
            found.append(q.sin())
        tokens = k.reshape(T, KV_HEADS, SIZE), v.reshape(T, KV_HEADS, SIZE)
        new = write(*tokens, keys, values, SLOTS)
        if layer.keeps_keys:
            found.append(k)
        if layer.queries == "seen":
            found.append(q.reshape(-1, SIZE)[1:])
        if layer.reads_old_cache:
            found.append(keys[1] + new[0][1])
        q = q.view(T, HEADS, SIZE)
        y = o.paged_attention(q, *new, TABLES, LENGTHS, STARTS, *layer.options)
        return y, new[0], new[1]


# A program in which both composites are found.
USUAL = Program((Layer(True, True, True, True, "after", False, False, "flat", (0.25,)),), True)

layers = st.builds(
    Layer,
    sliced=st.booleans(),
    by_heads=st.booleans(),
    is_neox=st.booleans(),
    donates=st.booleans(),
    queries=st.sampled_from(["after", "before", "seen"]),
    keeps_keys=st.sampled_from([False, False, True]),
    reads_old_cache=st.sampled_from([False, False, True]),
    quantizes=st.sampled_from(["flat", "flat", "heads", "both", "no"]),
    options=st.sampled_from([(), (0.2,), (None, True, 7), (0.3, False, None, 4.0)]),
)
programs = st.builds(Program, st.lists(layers, min_size=1, max_size=2).map(tuple), st.booleans())


def make_caches(layout: str) -> tuple[Tensor, Tensor]:
    both = torch.randn(2, 4, KV_HEADS, 16, SIZE)
    if layout == "one tensor":
        both = both.transpose(0, 1).contiguous().transpose(0, 1)
    return both[0], both[0 if layout == "same" else 1]


def check(program: Program, layout: str) -> set[str]:
    """Compare with eager, native all the way down, and return which composites were formed."""
    x, caches = torch.randn(T, WIDTHS[0]), make_caches(layout)
    before = [t.clone() for t in (x, *caches)]
    with ir.priority(all_native()):
        expected = [t.clone() for t in program(x, *caches)]
    torch.compiler.reset()
    run = compiled(program.__call__)
    for got, wanted in zip(run(x, *caches), expected, strict=True):
        assert got.shape == wanted.shape
        assert got.dtype == wanted.dtype
        atol, rtol = (0.1, 0.125) if got.dtype == torch.float8_e4m3fn else (1e-4, 1e-4)
        torch.testing.assert_close(got.float(), wanted.float(), atol=atol, rtol=rtol)
    for given_, kept in zip((x, *caches), before, strict=True):
        assert torch.equal(given_, kept), "an input that was not donated has changed"
    return {f.op for f in opweave.compile.report().fusions if f.outcome == "fused"}


@pytest.mark.parametrize(
    "examples", [6, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize("provider", ["native", "opweave_c"])
def test_random_programs(provider: str, examples: int) -> None:
    priority = all_native() if provider == "native" else {}

    @settings(max_examples=examples, deadline=None, suppress_health_check=HEALTH)
    @given(
        program=programs,
        layout=st.sampled_from(["apart", "one tensor", "same"]),
        seed=st.integers(0, 2**32 - 1),
    )
    def run(program: Program, layout: str, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad(), ir.priority(priority):
            check(program, layout)

    run()


def test_the_usual_program() -> None:
    assert check(USUAL, "apart") == {"rope_reshape_and_cache", "attention_quant"}
    with ir.priority(all_native()):
        assert check(USUAL, "one tensor") == set()

"""Ways to run a language model: at once, in steps through a cache, on several layers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.conformance import layers
from opweave.conformance.layers import Rank
from opweave.layers import SequenceStates, StateCache
from opweave.layers.parallel import TensorParallel, tensor_parallel
from opweave_engine.models import ForwardContext, forward_context

# Lowered graphs run as they are by default, and through code generation in the long sweep.
each_codegen = pytest.mark.parametrize(
    "codegen", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["graph", "code"]
)
Built = TypeVar("Built")
Result = TypeVar("Result")


class LanguageModel(Protocol):
    """Interface of every language model."""

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class GrowingCache:
    """A cache of one sequence that is a list of what was appended."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            old_key, old_value = self.layers[layer]
            key, value = torch.cat((old_key, key)), torch.cat((old_value, value))
        self.layers[layer] = key.clone(), value.clone()
        return self.layers[layer]


class PackedAttention:
    """Attention over all keys and values of the sequences, one after the other."""

    def __init__(self, starts: Tensor, ends: Tensor, cache: GrowingCache) -> None:
        self.starts, self.ends, self.cache = starts, ends, cache

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        key, value = self.cache.append(layer, key, value)
        options = scale, True, window, soft_cap
        out: Tensor = ir.ops.varlen_attention(query, key, value, self.starts, self.ends, *options)
        return out

    def attend_latent(
        self,
        layer: int,
        query: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        kv_b_weight: Tensor,
        scale: float,
    ) -> Tensor:
        kv_c, k_pe = self.cache.append(layer, kv_c, k_pe)
        if query.shape[0] == len(self.starts) - 1:
            rows = torch.cat((kv_c, k_pe), -1)[:, None]
            return self._decode(query, rows, kv_b_weight, scale)
        out: Tensor = ir.ops.mla_attention_prefill(
            query, kv_c, k_pe, kv_b_weight, self.starts, self.ends, scale
        )
        return out

    def _decode(self, query: Tensor, rows: Tensor, kv_b_weight: Tensor, scale: float) -> Tensor:
        """Attend to packed rows as to a paged cache, every page of which is one row."""
        lengths = self.ends.diff()
        pages = self.ends[:-1, None] + torch.arange(int(lengths.max()), dtype=torch.int32)
        out: Tensor = ir.ops.mla_attention_decode(
            query, rows, kv_b_weight, pages, lengths, self.starts, scale
        )
        return out


def step_context(
    starts: Tensor, ends: Tensor, cache: GrowingCache, states: SequenceStates | None = None
) -> ForwardContext:
    """Return the context of a forward of packed sequences.

    Args:
        starts: ``(sequences + 1,)``: where each one's new tokens begin.
        ends: the same for all of its tokens.
        cache, states: what is known of earlier tokens.
    """
    return ForwardContext(PackedAttention(starts.int(), ends.int(), cache), states)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-4)


def whole(model: LanguageModel, ids: Tensor) -> Tensor:
    return model.compute_logits(model(ids, torch.arange(len(ids))))


def in_steps(model: LanguageModel, ids: Tensor, sizes: list[int]) -> Tensor:
    """Run a sequence in parts of these *sizes*, then one token at a time."""
    cache, states, logits, start = GrowingCache(), StateCache(1), [], 0
    for size in [*sizes, *[1] * (len(ids) - sum(sizes))]:
        end = start + size
        starts, ends = torch.tensor([0, size]), torch.tensor([0, end])
        own_states = SequenceStates.of([size], [start], [0], states)
        with forward_context(step_context(starts, ends, cache, own_states)):
            hidden = model(ids[start:end], torch.arange(start, end))
        logits.append(model.compute_logits(hidden))
        start = end
    return torch.cat(logits)


def expected(reference: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference(ids[None]).logits[0]
    return logits


def compiled(model: Any, codegen: bool) -> Any:
    """Return *model* as one compiled graph."""
    torch.compiler.reset()
    options = {"codegen": codegen}
    return torch.compile(model, backend="opweave", fullgraph=True, dynamic=True, options=options)


def on_ranks(size: int, build: Callable[[], Built], run: Callable[[Built], Result]) -> list[Result]:
    """Build a model's part for each of *size* ranks, and run the parts side by side in threads."""
    building = threading.Lock()

    def one(rank: Rank) -> Result:
        parallel = TensorParallel(rank.rank, rank.size, rank.all_reduce, rank.all_gather)
        with torch.inference_mode():
            with building, tensor_parallel(parallel):
                part = build()
            return run(part)

    return layers.on_ranks(size, one)

"""Sequences in a paged cache, and attention to each of them alone, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .oracle import DTYPES

NAN = float("nan")


@dataclass
class Case:
    """The arguments of a call, and the packed keys and values that the caches hold."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    tables: Tensor
    lengths: Tensor
    starts: Tensor
    scale: float = 0.3
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None

    def arguments(self) -> tuple[Any, ...]:
        return tuple(self.__dict__.values())

    def out(self) -> Tensor:
        tokens, heads, _ = self.query.shape
        return torch.full((tokens, heads, self.value_cache.shape[3]), 7.0, dtype=self.query.dtype)


def case(
    sequences: list[tuple[int, int]],  # (queries, keys)
    *,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (64, 64),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    extra: int = 0,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Make sequences in shuffled blocks; unused slots are NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-keys // block_size) for _, keys in sequences]
    blocks, width = sum(counts) + 2, max([*counts, 0]) + 1
    caches = [torch.full((blocks, heads[1], block_size, size), NAN, dtype=dtype) for size in sizes]
    order = torch.randperm(blocks, generator=generator)
    tables = torch.randint(-(2**31), 2**31, (len(sequences), width), generator=generator).int()
    used = 0
    for i, (_, keys) in enumerate(sequences):
        tables[i, : counts[i]] = order[used : used + counts[i]].int()
        used += counts[i]
        for cache in caches:
            for p in range(keys):
                row = torch.randn(heads[1], cache.shape[3], generator=generator)
                cache[tables[i, p // block_size], :, p % block_size] = row.to(dtype)
    tokens = sum(queries for queries, _ in sequences)
    query = torch.randn(tokens + extra, heads[0], sizes[0], generator=generator).to(dtype)
    starts = torch.tensor([0, *(queries for queries, _ in sequences)]).cumsum(0).int()
    lengths = torch.tensor([keys for _, keys in sequences], dtype=torch.int32)
    key_cache, value_cache = caches
    return Case(query, key_cache, value_cache, tables, lengths, starts, **options)


def reference(c: Case) -> Tensor:
    """Attention of each sequence alone, in float64: torch's own, or spelled out for a soft cap."""
    out = c.out().double().zero_()
    block_size = c.key_cache.shape[2]
    for i, length in enumerate(c.lengths.tolist()):
        start, end = c.starts[i : i + 2].tolist()
        places = [(int(c.tables[i, p // block_size]), p % block_size) for p in range(length)]
        if not places or start == end:
            continue
        group = c.query.shape[1] // c.key_cache.shape[1]
        key, value = (
            torch.stack([cache[b, :, o] for b, o in places], 1).double().repeat_interleave(group, 0)
            for cache in (c.key_cache, c.value_cache)
        )
        query = c.query[start:end].double().transpose(0, 1)
        position = torch.arange(length - (end - start), length)[:, None]
        distance = position - torch.arange(length)
        seen = distance >= 0 if c.causal else torch.ones_like(distance, dtype=torch.bool)
        if c.window is not None:
            seen &= distance < c.window
        if c.soft_cap is None:
            found = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, scale=c.scale
            )
        else:
            scores = c.soft_cap * torch.tanh(query @ key.mT * c.scale / c.soft_cap)
            found = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
        found = found.masked_fill(~seen.any(-1, keepdim=True), 0)
        out[start:end] = found.transpose(0, 1)
    return out


# Layouts of one tensor that holds keys and values: the order of its dimensions, of which 0 tells
# keys from values and 1 to 4 are those of a cache; where 0 is; and the order that leads back.
SHARED: dict[str, tuple[tuple[int, ...], int, tuple[int, ...]]] = {
    "halves": ((0, 1, 2, 3, 4), 0, (0, 1, 2, 3)),
    "blocks": ((1, 0, 2, 3, 4), 1, (0, 1, 2, 3)),
    "heads": ((1, 2, 0, 3, 4), 2, (0, 1, 2, 3)),
    "positions": ((1, 2, 3, 0, 4), 3, (0, 1, 2, 3)),
    "positions before heads": ((0, 1, 3, 2, 4), 0, (0, 2, 1, 3)),
    "blocks of positions before heads": ((1, 0, 3, 2, 4), 1, (0, 2, 1, 3)),
    "heads of positions": ((1, 3, 2, 0, 4), 3, (0, 2, 1, 3)),
}
WHOLE_HEADS = ("halves", "blocks", "heads")
"""The layouts in which the positions of a head are contiguous."""


def in_one_tensor(key_cache: Tensor, value_cache: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return the caches as views of one tensor, as engines allocate them."""
    order, dim, back = SHARED[layout]
    memory = torch.stack((key_cache, value_cache)).permute(order).contiguous()
    keys, values = (half.permute(back) for half in memory.unbind(dim))
    assert torch.equal(keys.nan_to_num(), key_cache.nan_to_num())
    return keys, values


DECODE = [(1, 1), (1, 16), (1, 17), (1, 70), (1, 128), (1, 5)]
PREFILL = [(1, 1), (5, 5), (33, 70), (17, 17), (3, 129)]
MIXED = [(0, 9), (1, 40), (0, 0), (20, 20), (7, 65)]
BLIND = [(3, 0), (5, 2), (1, 1)]  # more queries than keys: the first ones see nothing


def drawn_cases(count: int, seed: int = 0) -> Iterator[tuple[Case, Random]]:
    """Yield any sequences, sizes and options, and what draws other arguments."""
    pick = Random(seed)

    def size() -> int:
        return 32 * pick.randint(1, 4) if pick.random() < 0.7 else pick.randint(1, 70)

    for number in range(count):
        most = 200 if pick.random() < 0.1 else 50  # more than a tile of keys, or fewer
        kv_heads, causal = pick.randint(1, 3), pick.random() < 0.75
        drawn = case(
            [
                (pick.randint(0, most // 4), pick.randint(0, most))
                for _ in range(pick.randint(0, 3))
            ],
            heads=(kv_heads * pick.randint(1, 5), kv_heads),
            sizes=(size(), size()),
            block_size=16 * pick.randint(1, 3),
            dtype=pick.choice(DTYPES),
            extra=pick.randint(0, 1),
            seed=number,
            scale=pick.random(),
            causal=causal,
            window=pick.choice([None, pick.randint(1, 40)]) if causal else None,
            soft_cap=pick.choice([None, pick.uniform(0.1, 5)]),
        )
        yield drawn, pick

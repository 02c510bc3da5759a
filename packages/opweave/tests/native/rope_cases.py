"""Tokens to rotate, and the paged cache that their keys and values go to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opweave.ir.ops.kv_cache import reshape_and_cache

from .oracle import positions, random, rounded, table


@dataclass(frozen=True)
class Case:
    """The arguments of the op."""

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor
    table: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor
    head_size: int
    is_neox: bool = True

    def arguments(self) -> tuple[Any, ...]:
        return tuple(self.__dict__.values())

    def copy(self) -> Case:
        copies = (v.clone() if isinstance(v, Tensor) else v for v in self.arguments())
        return Case(*copies)


def case(
    tokens: int = 7,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 8,
    size: int = 8,
    value_size: int = 8,
    blocks: int = 4,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    flat: bool = True,
    is_neox: bool = True,
    table_dtype: torch.dtype | None = None,
    index: torch.dtype = torch.int64,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[torch.rand(len(slots), generator=generator) < 0.2] = -1
    tokens = len(slots)
    last = [(n * head_size,) if flat else (n, head_size) for n in (heads, kv_heads)]
    return Case(
        random(tokens, *last[0], dtype=dtype, seed=seed),
        random(tokens, *last[1], dtype=dtype, seed=seed + 1),
        random(tokens, kv_heads, value_size, dtype=dtype, seed=seed + 2),
        positions(tokens, seed=seed, dtype=index),
        table(size, table_dtype or dtype, seed=seed),
        random(blocks, kv_heads, block_size, head_size, dtype=dtype, seed=seed + 3),
        random(blocks, kv_heads, block_size, value_size, dtype=dtype, seed=seed + 4),
        slots,
        head_size,
        is_neox,
    )


def written(x: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    result = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            result[slot // cache.shape[2], :, slot % cache.shape[2]] = x[token]
    return result


def composed(c: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated and rounded, then written by native."""
    query, key = rounded(c.query, c.key, c.positions, c.table, c.head_size, c.is_neox)
    key = key.view(*c.value.shape[:2], c.head_size)
    caches: tuple[Tensor, Tensor] = reshape_and_cache.native(
        key, c.value, c.key_cache, c.value_cache, c.slots
    )
    return query, *caches


def projection(dtype: torch.dtype, flat: bool, tokens: int = 6) -> tuple[Tensor, Case]:
    """Slices of one projection of 4, 2 and 2 heads of 16; a block's keys and values in a row."""
    qkv = random(tokens, 8 * 16, dtype=dtype)
    both = random(4, 2, 2, 16, 16, dtype=dtype, seed=1)
    query, key, value = qkv.split((64, 32, 32), -1)
    if not flat:
        query, key = (torch.unflatten(x, -1, (-1, 16)) for x in (query, key))
    c = case(tokens, 4, 2, 16, 16, 16, dtype=dtype)
    value = torch.unflatten(value, -1, (-1, 16))
    caches = {"key_cache": both[:, 0], "value_cache": both[:, 1]}
    return qkv, replace(c, query=query, key=key, value=value, **caches)

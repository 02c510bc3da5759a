"""The paged cache holds what was written, rotated or not, where it was written."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.ops.kv_cache import reshape_and_cache, rope_reshape_and_cache

from .oracle import DTYPES, assert_rotated_bits, positions, random, rounded, table, using_threads
from .paged_cases import SHARED, in_one_tensor

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def case(
    tokens: int = 7,
    heads: int = 2,
    size: int = 8,
    value_size: int = 8,
    blocks: int = 4,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[torch.rand(len(slots), generator=generator) < 0.2] = -1
    tokens = len(slots)
    return (
        random(tokens, heads, size, dtype=dtype, seed=seed),
        random(tokens, heads, value_size, dtype=dtype, seed=seed + 1),
        random(blocks, heads, block_size, size, dtype=dtype, seed=seed + 2),
        random(blocks, heads, block_size, value_size, dtype=dtype, seed=seed + 3),
        slots,
    )


def written(x: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    result = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            result[slot // cache.shape[2], :, slot % cache.shape[2]] = x[token]
    return result


def assert_same(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("shift", [0, 1], ids=["lines", "between lines"])
@pytest.mark.parametrize("size", [128, 72])
def test_so_much_that_it_goes_past_the_caches(module: ModuleType, size: int, shift: int) -> None:
    key, value, *caches, slots = case(2500, 8, size, 192, 26, 96)
    shifted = [torch.empty(c.numel() + shift)[shift:].view(c.shape).copy_(c) for c in caches]
    assert 4 * (key.numel() + value.numel()) > 2**23
    wanted = reshape_and_cache.native(key, value, *caches, slots)
    with using_threads(2):
        module.reshape_and_cache(key, value, *shifted, slots)
    for got, expected in zip(shifted, wanted, strict=True):
        assert_same(got, expected)


def test_every_bit_pattern_is_copied(module: ModuleType) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        key = codes.view(dtype).view(64, 8, 128)
        caches = [torch.zeros(2, 8, 32, 128, dtype=dtype) for _ in range(2)]
        module.reshape_and_cache(key, key, *caches, torch.arange(63, -1, -1))
        back = caches[1].transpose(1, 2).reshape(64, 8, 128).flip(0)
        assert torch.equal(back.view(torch.int16), key.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", SHARED)
def test_caches_in_one_tensor(module: ModuleType, layout: str, dtype: torch.dtype) -> None:
    key, value, *separate, slots = case(tokens=40, heads=3, dtype=dtype)
    wanted = written(key, separate[0], slots), written(value, separate[1], slots)
    caches = in_one_tensor(separate[0], separate[1], layout)
    strides = [cache.stride() for cache in caches]
    with ir.priority(reshape_and_cache=["opweave_c!"]):
        functional = reshape_and_cache(key, value, *caches, slots)
        for cache, before in zip(caches, separate, strict=True):
            assert_same(cache, before)
        donated = reshape_and_cache.maybe_inplace(key, value, *caches, slots)
    defined = reshape_and_cache.native(key, value, *caches, slots)
    for found in (functional, donated, defined):
        assert [cache.stride() for cache in found] == strides
        for got, expected in zip(found, wanted, strict=True):
            assert_same(got, expected)
    assert all(a is b for a, b in zip(donated, caches, strict=True))


def test_definition_is_differentiable_and_traceable() -> None:
    key, value, key_cache, value_cache, slots = case()
    with torch.enable_grad():
        key.requires_grad_()
        reshape_and_cache(key, value, key_cache, value_cache, slots)[0].sum().backward()
    assert key.grad is not None
    assert torch.equal(key.grad[:, 0, 0], (slots >= 0).float())
    compiled = torch.compile(reshape_and_cache.native, fullgraph=True, backend="aot_eager")
    got = compiled(key.detach(), value, key_cache, value_cache, slots)
    assert torch.equal(got[1], written(value, value_cache, slots))


# Rotation, alone, after the norm of every head, and into the cache


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("largest", [1.0, 2.0**80, 2.0**90, 3e38, torch.inf, torch.nan])
def test_norm_with_any_weight_and_epsilon(
    module: ModuleType, isa: str, largest: float, epsilon: float, dtype: torch.dtype
) -> None:
    """Heads of four rows that are zero, tiny, huge and usual, against one op after the other."""
    largest = min(largest, torch.finfo(dtype).max) if largest < torch.inf else largest
    size, where = 64, positions(4)
    cache = table(size, dtype)
    weight = random(size, dtype=dtype)
    weight[3] = largest
    query, key = random(4, 5, size, dtype=dtype), random(4, 2, size, dtype=dtype, seed=1)
    for x in (query, key):
        x[0] = 0.0
        x[1] *= 1e-25 if dtype != torch.float16 else 1e-6
        x[2] *= 1e30 if dtype != torch.float16 else 1e4
    normed = [torch.empty_like(x) for x in (query, key)]
    for mine, x in zip(normed, (query, key), strict=True):
        module.rms_norm(mine, x, weight, epsilon)
    module.rotary_embedding(*normed, *normed, where, cache, size, True)
    module.qk_norm_rope(query, key, query, key, where, cache, weight, weight, epsilon, size, True)
    assert_rotated_bits(query, normed[0], isa)
    assert_rotated_bits(key, normed[1], isa)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_is_rotated_as_in_the_definition(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    query = codes.view(512, 128).clone()
    key = codes.flip(0).roll(31).view(512, 128).clone()
    where, cache = positions(512), table(128, dtype)
    wanted = rounded(query, key, where, cache, 128, True)
    module.rotary_embedding(query, key, query, key, where, cache, 128, True)
    assert_rotated_bits(query, wanted[0], isa)
    assert_rotated_bits(key, wanted[1], isa)


def rotated_and_written(*arguments: Any) -> tuple[Tensor, ...]:
    """Rotate, round, and write with native."""
    query, key, value, where, cache, key_cache, value_cache, slots, head_size = arguments
    query, key = rounded(query, key, where, cache, head_size)
    heads = key.view(*value.shape[:2], head_size)
    return query, *reshape_and_cache.native(heads, value, key_cache, value_cache, slots)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_so_much_is_rotated_that_it_goes_past_the_caches(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    key, value, *caches, slots = case(4200, 4, 128, 192, 44, 96, dtype)
    assert key.nbytes + value.nbytes > 2**23
    query, where = random(len(slots), 2, 128, dtype=dtype, seed=5), positions(len(slots))
    arguments = (query, key, value, where, table(128, dtype), *caches, slots, 128)
    wanted, before = rotated_and_written(*arguments), [t.clone() for t in (query, key, value)]
    out = torch.full_like(query, 9)
    module.rope_reshape_and_cache(out, *arguments, True)
    for got, expected in zip((out, *caches), wanted, strict=True):
        assert_rotated_bits(got, expected, isa)
    assert all(map(torch.equal, (query, key, value), before))


@pytest.mark.parametrize("flat", [True, False])
def test_slices_of_one_projection_are_rotated_into_the_cache(
    module: ModuleType, flat: bool
) -> None:
    qkv = random(6, 8 * 16, dtype=torch.bfloat16)
    parts = [t if flat else torch.unflatten(t, -1, (-1, 16)) for t in qkv.split((64, 32, 32), -1)]
    query, key, value = *parts[:2], parts[2].unflatten(-1, (-1, 16)) if flat else parts[2]
    both = random(4, 2, 2, 16, 16, dtype=torch.bfloat16, seed=1)
    slots = torch.tensor([3, -1, 63, 0, 17, 40])
    cache = table(16, torch.bfloat16)
    arguments = (query, key, value, positions(6), cache, both[:, 0], both[:, 1], slots, 16)
    before, wanted = qkv.clone(), rotated_and_written(*arguments)
    with rope_reshape_and_cache.set_priority(["opweave_c!"]):
        donated = rope_reshape_and_cache.maybe_inplace(*arguments)
    assert torch.equal(qkv, before), "the queries are not copied to be rotated"
    assert donated[0].stride() == wanted[0].stride()
    assert donated[1].data_ptr() == both.data_ptr()
    for got, expected in zip(donated, wanted, strict=True):
        assert torch.equal(got, expected)

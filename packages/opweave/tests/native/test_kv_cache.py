"""The paged cache holds what was written, where it was written, and nothing else changes."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.ops.kv_cache import reshape_and_cache

from .oracle import CALL_PATHS, DTYPES, call_path, random, using_threads
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


def fuzz(module: ModuleType, cases: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for number in range(cases):
        key, value, *caches, slots = case(
            draw(0, 20),
            draw(1, 4),
            draw(1, 20),
            draw(1, 20),
            draw(1, 4),
            draw(1, 20),
            DTYPES[draw(0, 2)],
            seed=number,
        )
        wanted = written(key, caches[0], slots), written(value, caches[1], slots)
        run = call_path(module, CALL_PATHS[draw(0, 1)], "reshape_and_cache")
        run(key, value, *caches, slots)
        assert torch.equal(caches[0], wanted[0])
        assert torch.equal(caches[1], wanted[1])


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_case(module: ModuleType, count: int) -> None:
    fuzz(module, count, seed=0)

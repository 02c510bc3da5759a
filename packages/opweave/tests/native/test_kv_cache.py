"""The paged cache holds what was written, where it was written, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.ops.kv_cache import reshape_and_cache
from opweave.kernels.opweave_c import paged_attention

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALL_PATHS)
def test_values(module: ModuleType, name: str, dtype: torch.dtype) -> None:
    for tokens, heads, size, value_size, blocks, block_size in (
        (7, 2, 8, 8, 4, 16),
        (1, 1, 1, 3, 1, 1),
        (0, 2, 8, 8, 4, 16),
        (40, 3, 72, 64, 5, 10),
        (5, 0, 8, 8, 2, 16),
        (200, 8, 128, 128, 8, 64),
    ):
        key, value, *caches, slots = case(
            tokens, heads, size, value_size, blocks, block_size, dtype
        )
        wanted = written(key, caches[0], slots), written(value, caches[1], slots)
        native = reshape_and_cache.native(key, value, *caches, slots)
        call_path(module, name, "reshape_and_cache")(key, value, *caches, slots)
        for got, expected, defined in zip(caches, wanted, native, strict=True):
            assert_same(got, expected)
            assert_same(defined, expected)


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


def test_slices_and_shared_blocks(module: ModuleType) -> None:
    _, _, _, _, slots = case()
    qkv = random(7, 8, 16, dtype=torch.bfloat16)
    key, value = qkv[:, 4:6], qkv.transpose(0, 1).contiguous().transpose(0, 1)[:, 6:]
    both = random(4, 2, 2, 16, 16, dtype=torch.bfloat16)  # keys and values of a block in a row
    wanted = written(key, both[:, 0], slots), written(value, both[:, 1], slots)
    module.reshape_and_cache(key, value, both[:, 0], both[:, 1], slots)
    assert_same(both[:, 0], wanted[0])
    assert_same(both[:, 1], wanted[1])
    halves = random(2, 4, 2, 16, 16, dtype=torch.bfloat16)
    wanted = written(key, halves[0], slots), written(value, halves[1], slots)
    module.reshape_and_cache(key, value, halves[0], halves[1], slots)
    assert_same(halves[0], wanted[0])
    assert_same(halves[1], wanted[1])


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


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def changed(**changes: Any) -> tuple[Any, ...]:
    values = dict(zip(("key", "value", "key_cache", "value_cache", "slots"), case(), strict=True))
    return tuple({**values, **changes}.values())


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def aliased() -> tuple[Any, ...]:
    key, value, key_cache, _, slots = case()
    return key, value, key_cache, key_cache, slots


def inside() -> tuple[Any, ...]:
    _, value, key_cache, value_cache, slots = case()
    return key_cache.view(-1, 2, 8)[:7], value, key_cache, value_cache, slots


REFUSED: list[tuple[Callable[[], tuple[Any, ...]], str]] = [
    (lambda: changed(slots=ints(0, 1, 2, 3, 4, 5, 64)),
     "slot 64 of token 6 is not in a cache of 4 blocks of 16 positions, nor -1 for no slot"),
    (lambda: changed(slots=ints(0, -2, 2, 3, 4, 5, 6)), "slot -2 of token 1 is not in a cache"),
    (lambda: changed(slots=ints(2**40, 1, 2, 3, 4, 5, 6)), "slot 1099511627776 of token 0"),
    (lambda: changed(slots=ints(1, 2)), "key must have shape [2, kv_heads, head_size]"),
    (lambda: changed(slots=torch.zeros(7)), "slot_mapping must be int64"),
    (lambda: changed(slots=ints(*range(14))[::2]), "slot_mapping must be contiguous"),
    (lambda: changed(slots=ints(*range(7))[:, None]), "slot_mapping must have shape [tokens]"),
    (lambda: changed(key=empty(7, 2, 8, dtype=torch.float64)), "key must be float32"),
    (lambda: changed(key=empty(7, 2, 16)[..., ::2]), "key must be contiguous in its last"),
    (lambda: changed(value=empty(7, 2, 8, dtype=torch.float16)), "value must have the dtype of k"),
    (lambda: changed(key_cache=empty(4, 2, 16, 9)),
     "key_cache must have shape [blocks, 2, block_size, 8]"),
    (lambda: changed(key_cache=empty(4, 2, 8, 16).mT), "key_cache must be contiguous"),
    (lambda: changed(value_cache=empty(5, 2, 16, 8)),
     "value_cache must have shape [4, 2, 16, head_size], as key_cache has it"),
    (lambda: changed(key_cache=empty(1, 2, 16, 8).expand(4, 2, 16, 8)),
     "key_cache must not overlap itself"),
    (aliased, "key_cache is written and must not share memory with value_cache"),
    (inside, "key_cache is written and must not share memory with key"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "expected"), REFUSED, ids=[c[1][:50] for c in REFUSED])
def test_refusals(module: ModuleType, make: Callable[[], tuple[Any, ...]], expected: str) -> None:
    for name in CALL_PATHS:
        arguments = make()
        before = [a.clone() for a in arguments]
        with pytest.raises(RuntimeError) as error:
            call_path(module, name, "reshape_and_cache")(*arguments)
        assert str(error.value).startswith(f"reshape_and_cache: {expected}")
        for argument, copy in zip(arguments, before, strict=True):
            assert torch.equal(argument, copy)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"slots": ints(0, 1, 2, 3, 4, 5, 64)}, IndexError, "out of (bounds|range)"),
        ({"slots": ints(0, 1, 2, 3, 4, 5, 65)}, IndexError, "out of (bounds|range)"),
        ({"slots": ints(0, -2, 2, 3, 4, 5, 6)}, IndexError, "out of (bounds|range)"),
        ({"slots": torch.zeros(7)}, ValueError, "slot_mapping must be int64"),
        ({"key": empty(7, 1, 8)}, ValueError, r"key must be \(7, 2, 8\)"),
        ({"key_cache": empty(4, 8)}, ValueError, "key_cache must be"),
        ({"value_cache": empty(5, 2, 16, 8)}, ValueError, "value_cache must be float32, "),
        ({"value": empty(7, 2, 8, dtype=torch.float16)}, ValueError, "value_cache must be float16"),
    ],
)
def test_errors_of_the_definition(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        reshape_and_cache.native(*changed(**changes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_provider(module: ModuleType, dtype: torch.dtype) -> None:
    key, value, key_cache, value_cache, slots = reshape_and_cache.generate_inputs(
        num_tokens=30, dtype=dtype
    )
    wanted = reshape_and_cache.native(key, value, key_cache, value_cache, slots)
    before = key_cache.clone()
    with reshape_and_cache.set_priority(["opweave_c!"]):
        functional = reshape_and_cache(key, value, key_cache, value_cache, slots)
        assert torch.equal(key_cache, before)
        donated = reshape_and_cache.maybe_inplace(key, value, key_cache, value_cache, slots)
    assert donated[0] is key_cache
    assert donated[1] is value_cache
    for mine, also, native in zip(functional, donated, wanted, strict=True):
        assert torch.equal(mine, native)
        assert torch.equal(also, native)
        assert mine.stride() == native.stride()


def test_selection(module: ModuleType) -> None:
    def chosen(**changes: Any) -> str:
        with reshape_and_cache.set_priority(["opweave_c"]):
            return reshape_and_cache.dispatch(*changed(**changes)).provider

    assert chosen() == "opweave_c"
    assert chosen(key_cache=empty(4, 2, 2, 16, 8)[:, 1]) == "opweave_c"
    assert chosen(key_cache=empty(4, 16, 2, 8).transpose(1, 2)) == "opweave_c"
    assert chosen(key_cache=empty(4, 2, 8, 16).mT) == "native"
    assert chosen(key=empty(7, 2, 16)[..., ::2]) == "native"
    assert chosen(key=empty(7, 2, 8, dtype=torch.float64)) == "native"
    assert chosen(slots=ints(*range(14))[::2]) == "native"


def test_opcheck_and_graph(module: ModuleType) -> None:
    arguments = case()
    torch.library.opcheck(torch.ops.opweave_c.reshape_and_cache.default, arguments)
    key, value, key_cache, value_cache, slots = arguments

    def step(key_cache: Tensor, value_cache: Tensor) -> Any:
        return paged_attention.reshape_and_cache(key, value, key_cache + 0, value_cache + 0, slots)

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(key_cache, value_cache)
    assert torch.equal(got[0], written(key, key_cache, slots))
    assert torch.equal(got[1], written(value, value_cache, slots))


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


def test_fuzz(module: ModuleType) -> None:
    fuzz(module, 300, seed=0)


@pytest.mark.slow
def test_fuzz_at_length(module: ModuleType) -> None:
    fuzz(module, 10_000, seed=1)

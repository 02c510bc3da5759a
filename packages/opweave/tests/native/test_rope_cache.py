"""Rotating into the paged cache is rotating, then writing: bit by bit, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.ops.kv_cache import rope_reshape_and_cache
from opweave.kernels.opweave_c import rotary

from .oracle import CALL_PATHS, DTYPES, call_path, using_threads
from .rope_cases import Case, case, composed, projection, written
from .rotary_oracle import assert_near, assert_same, rotated

NAME = "rope_reshape_and_cache"
# tokens, query heads, kv heads, head size, rotated, value size, blocks, block size
SHAPES = [
    (7, 4, 2, 64, 64, 64, 4, 16),
    (1, 1, 1, 1, 0, 3, 1, 1),
    (0, 4, 2, 16, 16, 16, 4, 16),
    (40, 3, 3, 72, 20, 64, 5, 10),
    (5, 2, 0, 8, 8, 8, 2, 16),
    (9, 0, 2, 33, 30, 5, 2, 16),
    (70, 8, 2, 128, 126, 128, 3, 64),
]


def native(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The composition, native all the way down."""
    with ir.priority(rotary_embedding=["native"], reshape_and_cache=["native"]):
        found: tuple[Tensor, Tensor, Tensor] = rope_reshape_and_cache.native(*arguments)
    return found


def check_exact(c: Case, query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Against products of complex numbers, and a loop over the tokens."""
    rest = (c.positions, c.table, c.head_size, c.is_neox)
    assert_near(query, rotated(c.query, *rest))
    key = rotated(c.key, *rest).view(*c.value.shape[:2], c.head_size)
    assert_near(key_cache, written(key, c.key_cache.double(), c.slots))
    assert torch.equal(value_cache, written(c.value, c.value_cache, c.slots))


def check(run: Callable[..., None], c: Case, isa: str, *, in_place: bool = False) -> None:
    """Against the composition, bit by bit."""
    wanted = composed(c)
    mine = c.copy()
    out = mine.query if in_place else torch.full_like(c.query, 9)
    run(out, *mine.arguments())
    for got, expected in zip((out, mine.key_cache, mine.value_cache), wanted, strict=True):
        assert_same(got, expected, isa)
    for given, kept in ((mine.key, c.key), (mine.value, c.value), (mine.slots, c.slots)):
        assert torch.equal(given, kept)
    assert in_place or torch.equal(mine.query, c.query)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALL_PATHS)
def test_values(module: ModuleType, isa: str, name: str, dtype: torch.dtype, is_neox: bool) -> None:
    run = call_path(module, name, NAME)
    for seed, shape in enumerate(SHAPES):
        c = case(
            *shape,
            dtype,
            seed,
            flat=seed % 2 == 0,
            is_neox=is_neox,
            table_dtype=torch.float32 if seed % 3 else dtype,
            index=torch.int32 if seed % 3 == 1 else torch.int64,
        )
        check(run, c, isa)
        check(run, c, isa, in_place=True)
        mine = c.copy()
        run(mine.query, *mine.arguments())
        check_exact(c, mine.query, mine.key_cache, mine.value_cache)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_its_composition(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        c = case(*shape, dtype, seed, flat=False)
        mine, other = c.copy(), c.copy()
        module.rope_reshape_and_cache(mine.query, *mine.arguments())
        rest = (c.positions, c.table, c.head_size, c.is_neox)
        module.rotary_embedding(other.query, other.key, other.query, other.key, *rest)
        caches = (other.key_cache, other.value_cache)
        module.reshape_and_cache(other.key, other.value, *caches, c.slots)
        assert torch.equal(mine.query, other.query)
        assert torch.equal(mine.key_cache, other.key_cache)
        assert torch.equal(mine.value_cache, other.value_cache)


def test_special_values(module: ModuleType, isa: str) -> None:
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0]
        values += [info.max, -info.max, info.tiny, info.smallest_normal / 4, 1.0]
        c = case(4, 2, 2, 64, 64, 64, dtype=dtype)
        heads = torch.tensor(values, dtype=dtype).repeat(52)[:512].view(4, 128)
        c.table[0, :3] = torch.tensor([float("nan"), 0.0, float("inf")])
        c.positions[0] = 0
        c = replace(c, query=heads, key=heads.flip(0), value=heads.view(4, 2, 64))
        wanted, out = composed(c), torch.empty_like(heads)
        module.rope_reshape_and_cache(out, *c.arguments())
        for got, expected in zip((out, c.key_cache, c.value_cache), wanted, strict=True):
            assert_same(got, expected, isa)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "heads"])
@pytest.mark.parametrize("tokens", [1, 6])
def test_slices(module: ModuleType, isa: str, dtype: torch.dtype, flat: bool, tokens: int) -> None:
    for in_place in (True, False):
        qkv, c = projection(dtype, flat, tokens)
        before = qkv.clone()
        wanted = composed(c)
        out = c.query if in_place else torch.full((tokens, 5, 20), 9.0).to(dtype)[:, :4, :16]
        if not in_place and flat:
            out = torch.full((tokens, 70), 9.0).to(dtype)[:, 3:67]
        module.rope_reshape_and_cache(out, *c.arguments())
        for got, expected in zip((out, c.key_cache, c.value_cache), wanted, strict=True):
            assert_same(got, expected, isa)
        assert torch.equal(qkv[:, 64:], before[:, 64:])
        assert in_place or torch.equal(qkv, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_does_not_depend_on_the_batch(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    c = case(300, 16, 4, 64, 64, 64, 20, 16, dtype, flat=False)
    whole = c.copy()
    with using_threads(2):
        module.rope_reshape_and_cache(whole.query, *whole.arguments())
    alone = c.copy()
    for i in range(300):
        rows = slice(i, i + 1)
        tokens = (alone.query[rows], alone.key[rows], alone.value[rows], alone.positions[rows])
        caches = (alone.key_cache, alone.value_cache, alone.slots[rows])
        module.rope_reshape_and_cache(tokens[0], *tokens, alone.table, *caches, 64, True)
    assert torch.equal(alone.query, whole.query)
    assert torch.equal(alone.key_cache, whole.key_cache)
    assert torch.equal(alone.value_cache, whole.value_cache)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_so_much_that_it_goes_past_the_caches(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    c = case(4200, 2, 4, 128, 128, 192, 44, 96, dtype, flat=False)
    assert c.key.nbytes + c.value.nbytes > 2**23
    check(module.rope_reshape_and_cache, c, isa)


# Refusals


def changed(**changes: Any) -> tuple[Any, ...]:
    c = case()
    out = changes.pop("out", None)
    c = replace(c, **changes)
    return (c.query if out is None else out), *c.arguments()


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


SHARED = torch.ones(4, 2, 16, 8)
ROWS = SHARED.view(-1)[: 7 * 32].view(7, 32)
REFUSED: list[tuple[Callable[[], tuple[Any, ...]], str]] = [
    (lambda: changed(query=ones(7, 32, dtype=torch.float64)), "query must be float32 or bfloat16"),
    (lambda: changed(query=ones(7, 33)), "query must have shape [..., heads * 8]"),
    (lambda: changed(query=ones(6, 32)), "query must have shape [*[7], heads * head_size]"),
    (lambda: changed(key=ones(7, 16, dtype=torch.float16)), "key must have the dtype of query"),
    (lambda: changed(key=ones(7, 24)), "key_cache must have shape [blocks, 3, block_size, 8]"),
    (lambda: changed(key=ones(16, 7).t()), "key must be contiguous in its last dimension"),
    (lambda: changed(value=ones(7, 16)), "value must have shape [7, kv_heads, head_size]"),
    (lambda: changed(value=ones(7, 3, 8)), "value_cache must have shape [blocks, 3, block_size"),
    (lambda: changed(out=ones(7, 16)), "out_query must have the shape of query"),
    (lambda: changed(out=ones(1, 32).expand(7, 32)), "out_query must not overlap itself"),
    (lambda: changed(head_size=0), "head_size must be positive, found 0"),
    (lambda: changed(table=ones(4, 10)), "cos_sin_cache must have shape [max_position, r]"),
    (lambda: changed(positions=ints(0, 0, 0, 64, 0, 0, 0)), "position 64 of token 3 is out of b"),
    (lambda: changed(positions=torch.zeros(7)), "positions must be int64 or int32"),
    (lambda: changed(positions=torch.zeros(1, 7).long()), "positions must have shape [tokens]"),
    (lambda: changed(slots=ints(0, 1, 2, 3, 4, 5, 64)), "slot 64 of token 6 is not in a cache of"),
    (lambda: changed(slots=ints(1, 2)), "key must have shape [2, kv_heads, head_size]"),
    (lambda: changed(slots=torch.zeros(7)), "slot_mapping must be int64"),
    (lambda: changed(key_cache=ones(4, 2, 16, 9)),
     "key_cache must have shape [blocks, 2, block_size, 8]"),
    (lambda: changed(key_cache=ones(4, 2, 8, 16).mT), "key_cache must be contiguous"),
    (lambda: changed(value_cache=ones(5, 2, 16, 8)), "value_cache must have shape [4, 2, 16, h"),
    (lambda: changed(key_cache=SHARED, value_cache=SHARED),
     "key_cache is written and must not share memory with value_cache"),
    (lambda: changed(key_cache=SHARED, query=ROWS, out=ones(7, 32)),
     "key_cache is written and must not share memory with query"),
    (lambda: changed(key_cache=SHARED, key=ROWS[:, :16]),
     "key_cache is written and must not share memory with key"),
    (lambda: changed(value_cache=SHARED, out=ROWS),
     "out_query is written and must not share memory with value_cache"),
    (lambda: changed(query=ROWS, out=ROWS, key=ROWS[:, :16]),
     "out_query is written and must not share memory with key"),
    (lambda: changed(query=ROWS, out=ROWS, value=ROWS.view(7, 4, 8)[:, :2]),
     "out_query is written and must not share memory with value"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "expected"), REFUSED, ids=[c[1][:50] for c in REFUSED])
def test_refusals(module: ModuleType, make: Callable[[], tuple[Any, ...]], expected: str) -> None:
    for name in CALL_PATHS:
        arguments = make()
        before = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        with pytest.raises(RuntimeError) as error:
            call_path(module, name, NAME)(*arguments)
        assert str(error.value).startswith(f"{NAME}: {expected}")
        for argument, copy in zip(arguments, before, strict=True):
            assert not isinstance(copy, Tensor) or torch.equal(argument, copy)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"slots": ints(0, 1, 2, 3, 4, 5, 64)}, IndexError, "out of (bounds|range)"),
        ({"positions": ints(0, 0, 0, 64, 0, 0, 0)}, IndexError, "out of (bounds|range)"),
        ({"key": ones(7, 24)}, ValueError, r"key must be \(7, 2, 8\)"),
        ({"value": ones(7, 16)}, ValueError, r"value must be \(7, 2, 8\)"),
        ({"table": ones(64, 10)}, ValueError, "cannot rotate 10 dimensions of a head of 8"),
        ({"key_cache": ones(4, 8)}, ValueError, "key_cache must be"),
    ],
)
def test_errors_of_the_definition(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        native(*changed(**changes)[1:])


# The implementation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_provider(module: ModuleType, dtype: torch.dtype) -> None:
    arguments = rope_reshape_and_cache.generate_inputs(num_tokens=30, dtype=dtype)
    wanted = native(*arguments)
    close = rope_reshape_and_cache.get_tolerance(dtype)
    before = [a.clone() for a in arguments[:8]]
    with rope_reshape_and_cache.set_priority(["opweave_c!"]):
        functional = rope_reshape_and_cache(*arguments)
        for argument, copy in zip(arguments[:8], before, strict=True):
            assert torch.equal(argument, copy)
        donated = rope_reshape_and_cache.maybe_inplace(*arguments)
    for got, given in zip(donated, (arguments[0], *arguments[5:7]), strict=True):
        assert got is given
    for mine, also, expected in zip(functional, donated, wanted, strict=True):
        torch.testing.assert_close(mine, expected, atol=close.atol, rtol=close.rtol)
        assert torch.equal(mine, also)
        assert mine.stride() == expected.stride()


def test_provider_on_slices(module: ModuleType) -> None:
    for flat in (True, False):
        qkv, c = projection(torch.bfloat16, flat)
        before = qkv.clone()
        wanted = composed(c)
        with rope_reshape_and_cache.set_priority(["opweave_c!"]):
            donated = rope_reshape_and_cache.maybe_inplace(*c.arguments())
        assert torch.equal(qkv, before), "the queries are not copied to be rotated"
        assert donated[0].stride() == wanted[0].stride()
        assert donated[1].data_ptr() == c.key_cache.data_ptr()
        for got, expected in zip(donated, wanted, strict=True):
            assert torch.equal(got, expected)


def test_selection(module: ModuleType) -> None:
    def chosen(**changes: Any) -> str:
        with rope_reshape_and_cache.set_priority(["opweave_c"]):
            return rope_reshape_and_cache.dispatch(*changed(**changes)[1:]).provider

    assert chosen() == "opweave_c"
    assert chosen(query=ones(7, 4, 8), key=ones(7, 2, 8)) == "opweave_c"
    assert chosen(table=ones(64, 6)) == "opweave_c"
    assert chosen(key_cache=ones(4, 2, 2, 16, 8)[:, 1]) == "opweave_c"
    assert chosen(key_cache=ones(4, 16, 2, 8).transpose(1, 2)) == "opweave_c"
    assert chosen(key_cache=ones(4, 2, 8, 16).mT) == "native"
    assert chosen(query=ones(7, 32).double()) == "native"
    assert chosen(query=ones(7, 64)[:, ::2]) == "native"
    assert chosen(positions=torch.zeros(7, dtype=torch.int8)) == "native"
    assert chosen(positions=torch.zeros(1, 7).long(), query=ones(1, 7, 32)) == "native"
    assert chosen(slots=ints(*range(14))[::2]) == "native"
    assert chosen(key=ones(7, 24)) == "native"


def test_opcheck_and_graph(module: ModuleType) -> None:
    c = case()
    operator = torch.ops.opweave_c.rope_reshape_and_cache.default
    torch.library.opcheck(operator, (torch.empty_like(c.query), *c.arguments()))
    wanted = composed(c)

    def step(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> Any:
        tokens = (query + 0, c.key, c.value, c.positions, c.table)
        caches = (key_cache + 0, value_cache + 0)
        return rotary.rope_reshape_and_cache(*tokens, *caches, c.slots, c.head_size)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(c.query, c.key_cache, c.value_cache), wanted, strict=True):
        assert torch.equal(got, expected)


def fuzz(module: ModuleType, isas: tuple[str, ...], cases: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    try:
        for number in range(cases):
            isa = isas[draw(0, len(isas) - 1)]
            module._select_isa(isa)
            dtype, head_size = DTYPES[draw(0, 2)], draw(1, 70)
            c = case(
                draw(0, 20),
                draw(0, 5),
                draw(1, 3),
                head_size,
                2 * draw(0, head_size // 2),
                draw(1, 40),
                draw(1, 4),
                draw(1, 20),
                dtype,
                number,
                flat=bool(draw(0, 1)),
                is_neox=bool(draw(0, 1)),
                table_dtype=torch.float32 if draw(0, 1) else dtype,
            )
            if draw(0, 1):  # rows with something between them
                wide = torch.nn.functional.pad(c.query, (draw(0, 3), draw(1, 3)), value=9.0)
                c = replace(c, query=wide[..., -c.query.shape[-1] - 1 : -1])
            run = call_path(module, CALL_PATHS[draw(0, 1)], NAME)
            check(run, c, isa, in_place=bool(draw(0, 1)))
    finally:
        module._select_isa(None)


def test_fuzz(module: ModuleType, isas: tuple[str, ...]) -> None:
    fuzz(module, isas, 300, seed=0)


@pytest.mark.slow
def test_fuzz_at_length(module: ModuleType, isa: str) -> None:
    fuzz(module, (isa,), 10_000, seed=1)

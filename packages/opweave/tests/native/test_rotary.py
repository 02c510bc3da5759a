"""Rotary embedding is its definition rounded once, alone and after the norm of every head."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotate
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotate

from opweave.ir.ops.rotary import qk_norm_rope, rotary_embedding

from .oracle import (
    CALL_PATHS,
    DTYPES,
    MAX_POSITION,
    assert_rotated,
    assert_rotated_bits,
    call_path,
    positions,
    random,
    rotated,
    rounded,
    table,
    using_threads,
)

SIZES = [(128, 128), (64, 64), (80, 20), (72, 72), (6, 2), (1, 0), (33, 30), (128, 126)]
HEADS = [(4, 2), (1, 1), (3, 0)]


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path_name", CALL_PATHS)
def test_values(
    module: ModuleType, isa: str, path_name: str, dtype: torch.dtype, is_neox: bool
) -> None:
    run = call_path(module, path_name, "rotary_embedding")
    for head_size, size in SIZES:
        for q_heads, k_heads in HEADS:
            for tokens in (0, 1, 5):
                query = random(tokens, q_heads * head_size, dtype=dtype)
                key = random(tokens, k_heads, head_size, dtype=dtype, seed=1)
                cache = table(size, torch.float32 if q_heads == 1 else dtype)
                where = positions(tokens, dtype=torch.int32 if k_heads else torch.int64)
                wanted = rounded(query, key, where, cache, head_size, is_neox)
                out_q, out_k = torch.full_like(query, 9), torch.full_like(key, 9)
                run(out_q, out_k, query, key, where, cache, head_size, is_neox)
                assert_rotated_bits(out_q, wanted[0], isa)
                assert_rotated_bits(out_k, wanted[1], isa)
                assert_rotated(out_q, rotated(query, where, cache, head_size, is_neox))
                run(query, key, query, key, where, cache, head_size, is_neox)
                assert torch.equal(query, out_q)
                assert torch.equal(key, out_k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_llama_and_gptj(module: ModuleType, dtype: torch.dtype) -> None:
    where, size = positions(9).abs() % MAX_POSITION, 64
    cos, sin = table(size, dtype)[where].chunk(2, -1)
    query, key = random(9, 4, size, dtype=dtype), random(9, 2, size, dtype=dtype, seed=2)
    out = torch.empty_like(query), torch.empty_like(key)
    module.rotary_embedding(*out, query, key, where, table(size, dtype), size, True)
    wanted = llama_rotate(query, key, cos.repeat(1, 2), sin.repeat(1, 2), unsqueeze_dim=1)
    close = rotary_embedding.get_tolerance(dtype)
    for mine, theirs in zip(out, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=close.atol, rtol=close.rtol)
    module.rotary_embedding(*out, query, key, where, table(size, dtype), size, False)
    theirs = gptj_rotate(query[None], sin[None], cos[None])[0]
    torch.testing.assert_close(out[0], theirs, atol=close.atol, rtol=close.rtol)


def norm_case(dtype: torch.dtype, kind: str, tokens: int = 5, head_size: int = 80) -> list[Any]:
    weights: list[Tensor | None] = [None, None]
    if kind != "none":
        as_dtype = dtype if kind == "same" else torch.float32
        weights = [random(head_size, dtype=as_dtype, seed=s) for s in (4, 5)]
    if kind == "one":
        weights = [None, random(head_size, dtype=dtype)]
    query = random(tokens, 4, head_size, dtype=dtype)
    key = random(tokens, 2, head_size, dtype=dtype, seed=1)
    cache = table(head_size - head_size % 2 - 2 * (head_size > 8), dtype)
    return [query, key, positions(tokens), cache, *weights, 1e-6, head_size, True]


@pytest.mark.parametrize("kind", ["none", "same", "float32", "one"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path_name", CALL_PATHS)
def test_norm_and_rotation(
    module: ModuleType, isa: str, path_name: str, dtype: torch.dtype, kind: str
) -> None:
    run = call_path(module, path_name, "qk_norm_rope")
    for tokens, head_size in ((5, 80), (3, 128), (2, 7), (0, 64), (1, 1)):
        query, key, *rest = norm_case(dtype, kind, tokens, head_size)
        wanted = qk_norm_rope.native(query, key, *rest)
        normed = [torch.empty_like(query), torch.empty_like(key)]
        module.rms_norm(normed[0], query, rest[2], rest[4])
        module.rms_norm(normed[1], key, rest[3], rest[4])
        module.rotary_embedding(*normed, *normed, *rest[:2], *rest[5:])
        out = torch.full_like(query, 9), torch.full_like(key, 9)
        run(*out, query, key, *rest)
        tolerance = qk_norm_rope.get_tolerance(dtype)
        for mine, native, composed in zip(out, wanted, normed, strict=True):
            assert torch.equal(mine, composed)
            torch.testing.assert_close(mine, native, atol=tolerance.atol, rtol=tolerance.rtol)
        run(query, key, query, key, *rest)
        assert torch.equal(query, out[0])


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


def slices(dtype: torch.dtype, tokens: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """A qkv projection of 4, 2 and 2 heads of 16, and its query and key."""
    qkv = random(tokens, 8 * 16, dtype=dtype)
    return qkv, qkv[:, :64], qkv[:, 64:96]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    query = codes.view(512, 128).clone()
    key = codes.flip(0).roll(31).view(512, 128).clone()
    where, cache = positions(512), table(128, dtype)
    wanted = rounded(query, key, where, cache, 128, True)
    module.rotary_embedding(query, key, query, key, where, cache, 128, True)
    assert_rotated_bits(query, wanted[0], isa)
    assert_rotated_bits(key, wanted[1], isa)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["rotary_embedding", "qk_norm_rope"])
def test_a_token_does_not_depend_on_the_batch(
    module: ModuleType, isa: str, dtype: torch.dtype, op: str
) -> None:
    query, key = random(300, 32, 64, dtype=dtype), random(300, 8, 64, dtype=dtype)
    where, cache = positions(300), table(64, dtype)
    norm = (random(64, dtype=dtype), random(64, dtype=dtype), 1e-6) if op == "qk_norm_rope" else ()
    whole = torch.empty_like(query), torch.empty_like(key)
    run = getattr(module, op)
    with using_threads(2):
        run(*whole, query, key, where, cache, *norm, 64, True)
    for i in (0, 1, 150, 299):
        alone = query[i : i + 1].clone(), key[i : i + 1].clone()
        run(*alone, *alone, where[i : i + 1], cache, *norm, 64, True)
        assert torch.equal(alone[0][0], whole[0][i])
        assert torch.equal(alone[1][0], whole[1][i])


def test_provider_on_slices(module: ModuleType) -> None:
    qkv, query, key = slices(torch.bfloat16)
    query, key = torch.unflatten(query, -1, (-1, 16)), torch.unflatten(key, -1, (-1, 16))
    where, cache = positions(6), table(16, torch.bfloat16)
    wanted = rounded(query, key, where, cache, 16)
    with rotary_embedding.set_priority(["opweave_c!"]):
        functional = rotary_embedding(query, key, where, cache, 16)
        donated = rotary_embedding.maybe_inplace(query, key, where, cache, 16)
    assert functional[0].stride() == wanted[0].stride()
    assert torch.equal(functional[0], wanted[0])
    assert torch.equal(donated[1], wanted[1])
    # Columns of a wider tensor do not have the strides of the op's result.
    assert donated[0].stride() == functional[0].stride()
    assert torch.equal(donated[0], functional[0])
    assert donated[0].data_ptr() != qkv.data_ptr()


def extreme(x: Tensor, draw: Callable[[int, int], int]) -> Tensor:
    """*x*, often with what leaves the range of its dtype when it is multiplied."""
    power = draw(-30, 30) if x.dtype == torch.bfloat16 else draw(-5, 4)
    x = x * 10.0**power if draw(0, 1) else x
    if x.numel() and draw(0, 2) == 0:
        special = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-39, 6e-8, 6e4, 3e38)[draw(0, 8)]
        x.view(-1)[draw(0, x.numel() - 1)] = special
    return x


def head_and_rotary_size(draw: Callable[[int, int], int]) -> tuple[int, int]:
    """Any sizes, or those of models."""
    if draw(0, 1):
        head_size = draw(1, 70)
        return head_size, 2 * draw(0, head_size // 2)
    head_size = (32, 64, 96, 128, 256, 288)[draw(0, 5)]
    return head_size, head_size // (1 + draw(0, 3) // 3)


def normalized(module: ModuleType, x: Tensor, weight: Tensor | None, head_size: int) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    heads = (-1, head_size)
    module.rms_norm(out.view(heads), x.reshape(heads), weight, 1e-6)
    return out


def fuzz(module: ModuleType, isas: tuple[str, ...], cases: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    try:
        for case in range(cases):
            isa = isas[draw(0, len(isas) - 1)]
            module._select_isa(isa)
            dtype, (head_size, size) = DTYPES[draw(0, 2)], head_and_rotary_size(draw)
            leading = [draw(0, 4) for _ in range(draw(0, 2))]
            heads, is_neox = (draw(0, 4), draw(0, 3)), bool(draw(0, 1))
            pad, flat = draw(0, 3), draw(0, 1)
            tensors = []
            for i, count in enumerate(heads):
                whole = random(*leading, count * head_size + pad, dtype=dtype, seed=case + i)
                x = extreme(whole, draw)[..., pad:]
                tensors.append(x if flat else torch.unflatten(x, -1, (count, head_size)))
            where = positions(*leading, seed=case)
            cache = table(size, dtype if draw(0, 1) else torch.float32, seed=case)
            path_name = CALL_PATHS[draw(0, 1)]
            if draw(0, 1):  # the same as one after the other
                kind = (None, dtype, torch.float32)[draw(0, 2)]
                weight = None if kind is None else random(head_size, dtype=kind, seed=case)
                wanted = [normalized(module, x, weight, head_size) for x in tensors]
                module.rotary_embedding(*wanted, *wanted, where, cache, head_size, is_neox)
                run = call_path(module, path_name, "qk_norm_rope")
                weights = (weight, weight)
                run(*tensors, *tensors, where, cache, *weights, 1e-6, head_size, is_neox)
            else:
                wanted = rounded(*tensors, where, cache, head_size, is_neox)
                run = call_path(module, path_name, "rotary_embedding")
                run(*tensors, *tensors, where, cache, head_size, is_neox)
            for got, expected in zip(tensors, wanted, strict=True):
                assert_rotated_bits(got, expected, isa)
    finally:
        module._select_isa(None)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_case(module: ModuleType, isas: tuple[str, ...], count: int) -> None:
    fuzz(module, isas, count, seed=0)

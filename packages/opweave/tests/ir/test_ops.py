"""Every op: its definition against independent ones, in values, shapes and dtypes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ir import oracles
from ir.workloads import OPS, check, dense, each_dtype, generated, special, tuple_of, with_options
from opweave import ir

TESTS = Path(__file__).parents[1]


def test_every_declared_op_has_an_oracle() -> None:
    here = {op.name for op in OPS}
    files = [*(TESTS / "native").glob("test_*.py"), *(TESTS / "ir").glob("test_*.py")]
    others = "".join(p.read_text(encoding="utf-8") for p in files if p != Path(__file__))
    assert here <= set(ir.ops.__all__)
    assert [n for n in ir.ops.__all__ if n not in here and n not in others] == []
    for op in OPS:
        assert callable(getattr(oracles, op.name))


def check_definition(op: ir.IrOp, all_values: Iterable[tuple[Any, ...]]) -> None:
    """Compare native with the oracle; the conformance kit compares kernels with native."""
    oracle = getattr(oracles, op.name)
    for values in all_values:
        before = copy.deepcopy(values)
        result, shown = op.native(*values), ir.explain(op, *values).call
        check(op, result, oracle(*values), shown, values)
        for out, wanted in zip(tuple_of(result), oracle(*values), strict=True):
            assert out.dtype == wanted.dtype, shown
        for value, old in zip(values, before, strict=True):
            same = torch.equal(value, old) if isinstance(value, Tensor) else value == old
            assert same, f"{shown}: an input was changed"


each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@each_op
@each_dtype
def test_values(op: ir.IrOp, dtype: torch.dtype) -> None:
    check_definition(op, generated(op, dtype))


@each_op
def test_values_with_options_and_special_shapes(op: ir.IrOp) -> None:
    check_definition(op, itertools.chain(with_options(op), special(op)))


# Other people's code


@each_dtype
def test_rms_norm_is_that_of_llama(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    theirs.weight.data = dense(96, dtype=dtype)
    x = dense(4, 7, 96, dtype=dtype)
    with torch.no_grad():
        if dtype is not torch.float64:  # theirs computes float64 in float32
            assert torch.equal(ir.ops.rms_norm.native(x, theirs.weight, 1e-5), theirs(x))
        for provider in ir.ops.rms_norm.supported_providers():
            ours = ir.ops.rms_norm.using(provider)(x, theirs.weight, 1e-5)
            atol, rtol = ir.ops.rms_norm.get_tolerance(
                torch.float32 if dtype is torch.float64 else dtype
            )
            torch.testing.assert_close(ours, theirs(x), atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_with_one_plus_weight_is_that_of_gemma(dtype: torch.dtype) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    theirs = GemmaRMSNorm(96, eps=1e-6)
    theirs.weight.data = torch.randn(96)
    x = dense(5, 96, dtype=dtype)
    with torch.no_grad():
        ours = ir.ops.rms_norm.native(x, 1 + theirs.weight, 1e-6)
        assert torch.equal(ours, theirs(x))


def llama_angles(head_size: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        head_dim=head_size,
        max_position_embeddings=64,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions[None])
    return cos, sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_size", [16, 64, 80])
def test_rotary_embedding_is_that_of_llama(dtype: torch.dtype, head_size: int) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    positions = torch.randint(64, (9,))
    cos, sin = llama_angles(head_size, positions, dtype)
    query, key = dense(9, 4, head_size, dtype=dtype), dense(9, 2, head_size, dtype=dtype)
    theirs = apply_rotary_pos_emb(query[None], key[None], cos, sin, unsqueeze_dim=2)
    everywhere = llama_angles(head_size, torch.arange(64), dtype)
    cache = torch.cat([t[0, :, : head_size // 2] for t in everywhere], -1)
    ours = ir.ops.rotary_embedding(query, key, positions, cache, head_size)
    half = head_size // 2
    applied = ir.ops.apply_rotary_emb(query, cos[0, :, :half], sin[0, :, :half])
    for a, b in zip((*ours, applied), (*(t[0] for t in theirs), theirs[0][0]), strict=True):
        atol, rtol = ir.ops.rotary_embedding.get_tolerance(dtype)
        torch.testing.assert_close(a, b, atol=atol, rtol=rtol)


def test_interleaved_rotary_embedding_is_that_of_gptj() -> None:
    from transformers.models.gptj import modeling_gptj as gptj

    positions, rotated = torch.arange(6), 8
    sincos = gptj.create_sinusoidal_positions(64, rotated)
    sin, cos = sincos[positions].chunk(2, -1)
    query, key = torch.randn(6, 4, 16), torch.randn(6, 2, 16)
    ours = ir.ops.rotary_embedding(
        query, key, positions, torch.cat(sincos.chunk(2, -1)[::-1], -1), 16, False
    )
    for x, found in zip((query, key), ours, strict=True):
        head = gptj.apply_rotary_pos_emb(x[None, ..., :rotated], sin[None], cos[None])[0]
        atol, rtol = ir.ops.rotary_embedding.get_tolerance(torch.float32)
        expected = torch.cat((head, x[..., rotated:]), -1)
        torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("provider", ir.ops.varlen_attention.supported_providers())
def test_packed_attention_is_torchs_by_segment(provider: str, causal: bool) -> None:
    lengths = [5, 1, 8, 3]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    q, k, v = torch.randn(17, 4, 16), torch.randn(17, 2, 16), torch.randn(17, 2, 16)
    ours = ir.ops.varlen_attention.using(f"{provider}!")(q, k, v, cu, cu, None, causal)
    for part, *qkv in zip(*(t.split(lengths) for t in (ours, q, k, v)), strict=True):
        theirs = functional.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in qkv), is_causal=causal, enable_gqa=True
        )[0].transpose(0, 1)
        check(ir.ops.varlen_attention, part, theirs)

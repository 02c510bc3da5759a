"""Every op, every provider: values, shapes and dtypes against independent definitions."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ir import oracles
from ir.workloads import (
    INPUTS,
    LAYOUTS,
    OPS,
    accepts,
    check,
    dense,
    each_dtype,
    each_provider,
    laid_out,
    tuple_of,
)
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


@pytest.mark.slow
@each_provider
@each_dtype
@pytest.mark.parametrize("layout", ["transposed", "expanded", "offset"])
def test_values_in_other_layouts(
    op: ir.IrOp, provider: str, dtype: torch.dtype, layout: str
) -> None:
    check_values(op, provider, dtype, layout)


@each_provider
@each_dtype
@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
def test_values(op: ir.IrOp, provider: str, dtype: torch.dtype, layout: str) -> None:
    check_values(op, provider, dtype, layout)


@each_provider
@pytest.mark.parametrize("layout", ["transposed", "expanded", "offset"])
def test_values_of_bfloat16_in_other_layouts(op: ir.IrOp, provider: str, layout: str) -> None:
    check_values(op, provider, torch.bfloat16, layout)


def check_values(op: ir.IrOp, provider: str, dtype: torch.dtype, layout: str) -> None:
    oracle, taken = getattr(oracles, op.name), 0
    for dense_values in INPUTS[op.name](op, dtype):
        values = laid_out(op, dense_values, layout)
        shown = ir.explain(op, *values).call
        if not accepts(op, provider, values):
            with ir.priority({op.name: [provider]}), torch.no_grad():
                check(op, op(*values), oracle(*values), shown, values)  # passed over, still right
            continue
        taken += 1
        before = [v.clone() if isinstance(v, Tensor) else v for v in values]
        with torch.no_grad(), op.set_priority([f"{provider}!"]):
            result = op(*values)
            donated = tuple_of(op.maybe_inplace(*copied(op, values))) if op.allow_inplace else ()
        check(op, result, oracle(*values), shown, values)
        if donated:
            check(op, donated, oracle(*values), shown, values)
        native = tuple_of(op.native(*values))
        check(op, result, native, shown, values)
        for out, reference in zip(tuple_of(result), native, strict=True):
            assert (out.shape, out.dtype, out.device) == (
                reference.shape,
                reference.dtype,
                reference.device,
            ), shown
        for value, old in zip(values, before, strict=True):
            same = torch.equal(value, old) if isinstance(value, Tensor) else value == old
            assert same, f"{shown}: an input was changed"
    without_float64 = (provider, op.name[-8:]) == ("aten", "rms_norm")
    without_float64 |= provider.startswith("opweave_c")
    assert taken or (dtype == torch.float64 and without_float64) or layout == "transposed"


@each_provider
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_those_of_native(op: ir.IrOp, provider: str, layout: str) -> None:
    """Compiled code relies on it: it knows only what native would return."""
    for dense_values in INPUTS[op.name](op, torch.float32):
        values = laid_out(op, dense_values, layout)
        if not accepts(op, provider, values):
            continue
        with torch.no_grad(), op.set_priority([f"{provider}!"]):
            results = tuple_of(op(*values))
        for out, native in zip(results, tuple_of(op.native(*values)), strict=True):
            assert strides(out) == strides(native), ir.explain(op, *values).call


def strides(t: Tensor) -> list[int]:
    """The strides that mean something."""
    pairs = zip(t.shape, t.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1] if t.numel() else []


def copied(op: ir.IrOp, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with copies of the activations, to be given away."""
    return tuple(v.clone() if i in op.activation_indices else v for i, v in enumerate(values))


@each_provider
def test_non_finite_values_stay_in_their_row(op: ir.IrOp, provider: str) -> None:
    """A NaN or an infinity in one token does not spread to others."""
    if "attention" in op.name or op.name in ("advance_step_flashattn", "embedding"):
        pytest.skip("tokens see each other, or there is no arithmetic")
    values = op.generate_inputs(num_tokens=4)
    for bad in (float("nan"), float("inf")):
        broken = [v.clone() if isinstance(v, Tensor) else v for v in values]
        broken[0][1, ..., 0] = bad
        if not accepts(op, provider, tuple(broken)):
            pytest.skip("not supported")
        with torch.no_grad(), op.set_priority([f"{provider}!"]):
            clean, found = tuple_of(op(*values)), tuple_of(op(*broken))
        if bad != bad:  # torch's own activations disagree with themselves about infinities
            check(op, found, op.native(*broken))
        for a, b in zip(clean, found, strict=True):
            assert torch.equal(a[[0, 2, 3]], b[[0, 2, 3]])


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

"""The trait ``batch_invariant``, taken at its word: bitwise equal rows in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ir.workloads import (
    OPS,
    PAIRS,
    accepts,
    dense,
    tuple_of,
)
from opweave import ir

# Batch invariance

INVARIANT = [
    pytest.param(op, provider, id=f"{op.name}-{provider}")
    for op, provider in PAIRS
    if "batch_invariant" in op.impls[provider].traits and op.name != "advance_step_flashattn"
]
SIZES = (2, 3, 17, 64)


def invariant_inputs(op: ir.IrOp, hidden: int, tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
    if "rotary" in op.name:
        return op.generate_inputs(num_tokens=tokens, head_size=2 * ((hidden + 1) // 2), dtype=dtype)
    return op.generate_inputs(num_tokens=tokens, hidden_size=hidden, dtype=dtype)


def rows(op: ir.IrOp, values: tuple[Any, ...], index: Any) -> tuple[Any, ...]:
    """The arguments for some of the tokens: everything that has a row per token is indexed."""
    per_token = {
        "apply_rotary_emb": {0, 1, 2},
        "rotary_embedding": {0, 1, 2},
        "rotary_embedding_single": {0, 1},
        "dual_chunk_rotary_embedding": {0, 1, 2},
        "fused_add_rms_norm": {0, 1},
    }.get(op.name, {0})
    return tuple(v[index].clone() if i in per_token else v for i, v in enumerate(values))


@pytest.mark.parametrize(("op", "provider"), INVARIANT)
@pytest.mark.parametrize("hidden", [1, 7, 64, 769])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(
    op: ir.IrOp, provider: str, hidden: int, dtype: torch.dtype
) -> None:
    if "attention" in op.name:
        pytest.skip("tested by sequence")
    values = invariant_inputs(op, hidden, 64, dtype)
    if not accepts(op, provider, values):
        pytest.skip("not supported")
    call = op.using(f"{provider}!")
    with torch.no_grad():
        whole = tuple_of(call(*values))
        for i in range(0, 64, 3):
            alone = tuple_of(call(*rows(op, values, slice(i, i + 1))))
            assert all(torch.equal(a[0], w[i]) for a, w in zip(alone, whole, strict=True))
        for size in SIZES:
            order = torch.randperm(64)[:size]
            part = tuple_of(call(*rows(op, values, order)))
            assert all(torch.equal(p, w[order]) for p, w in zip(part, whole, strict=True))


@pytest.mark.parametrize(
    "provider",
    [
        p
        for p in ir.ops.causal_attention.supported_providers()
        if "batch_invariant" in ir.ops.causal_attention.impls[p].traits
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_has_the_same_bits_in_any_batch(provider: str, dtype: torch.dtype) -> None:
    dense_op = ir.ops.causal_attention.using(f"{provider}!")
    packed = ir.ops.varlen_attention.using(f"{provider}!")
    q = dense(17, 5, 4, 24, dtype=dtype)
    k, v = (dense(17, 9, 2, 24, dtype=dtype) for _ in range(2))
    whole = dense_op(q, k, v)
    for size in (1, 2, 3, 16):
        order = torch.randperm(17)[:size]
        assert torch.equal(dense_op(q[order], k[order], v[order]), whole[order])
    # Packed with others of other lengths, anywhere; and a query at a time, as decoding does.
    for before, after in [(0, 3), (1, 0), (7, 2)]:
        other_q, other_k = (
            dense(before + after, 4, 24, dtype=dtype),
            dense(before + after, 2, 24, dtype=dtype),
        )
        cu_q = torch.tensor([0, before, before + 5, before + 5 + after])
        cu_k = torch.tensor([0, before, before + 9, before + 9 + after])
        mixed = [
            torch.cat([o[:before], s, o[before:]])
            for o, s in [(other_q, q[3]), (other_k, k[3]), (other_k, v[3])]
        ]
        out = packed(*mixed, cu_q, cu_k, None, True)
        assert torch.equal(out[before : before + 5], whole[3])
    for i in range(5):
        step = dense_op(q[3:4, i : i + 1], k[3:4, : 5 + i], v[3:4, : 5 + i])
        assert torch.equal(step[0, 0], whole[3, i])


def test_required_invariance_holds_end_to_end() -> None:
    """With the trait required, every op gives the same bits in every row, with any provider."""
    with torch.no_grad(), ir.require("batch_invariant"):
        for op in OPS:
            if "attention" in op.name or op.name == "advance_step_flashattn":  # integers only
                continue
            values = op.generate_inputs(num_tokens=17)
            assert "batch_invariant" in op.dispatch(*values).traits
            whole = tuple_of(op(*values))
            for i in (0, 5, 16):
                alone = tuple_of(op(*rows(op, values, slice(i, i + 1))))
                assert all(torch.equal(a[0], w[i]) for a, w in zip(alone, whole, strict=True))


@pytest.mark.parametrize("op", [ir.ops.linear, ir.ops.linear_w8a16], ids=lambda op: op.name)
def test_maps_of_many_tokens_need_not_go_row_by_row(op: ir.IrOp) -> None:
    if not op.impls["opweave_c"].supported:
        pytest.skip("no native module")
    values = op.generate_inputs(num_tokens=300)
    assert op.dispatch(*values).provider == "opweave_c"
    with ir.require("batch_invariant"):
        assert op.dispatch(*values).provider == "opweave_c_invariant"
        whole = op(*values)
        assert torch.equal(op(*rows(op, values, slice(7, 8)))[0], whole[7])

"""The trait ``batch_invariant`` from end to end; the conformance kit checks each implementation."""

from __future__ import annotations

import pytest
import torch

from ir.workloads import OPS, dense, tuple_of
from opweave import ir
from opweave.conformance import Subject
from opweave.conformance.inputs import Tokens, tokens_of


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
    """Packed with others of other lengths, anywhere; and a query at a time, as decoding does."""
    dense_op = ir.ops.causal_attention.using(f"{provider}!")
    packed = ir.ops.varlen_attention.using(f"{provider}!")
    q = dense(1, 5, 4, 24, dtype=dtype)
    k, v = (dense(1, 9, 2, 24, dtype=dtype) for _ in range(2))
    [whole] = dense_op(q, k, v)
    for before, after in [(0, 3), (1, 0), (7, 2)]:
        others = [dense(before + after, heads, 24, dtype=dtype) for heads in (4, 2, 2)]
        mixed = [
            torch.cat([o[:before], s[0], o[before:]])
            for o, s in zip(others, (q, k, v), strict=True)
        ]
        cu_q = torch.tensor([0, before, before + 5, before + 5 + after])
        cu_k = torch.tensor([0, before, before + 9, before + 9 + after])
        out = packed(*mixed, cu_q, cu_k, None, True)
        assert torch.equal(out[before : before + 5], whole)
    for i in range(5):
        step = dense_op(q[:, i : i + 1], k[:, : 5 + i], v[:, : 5 + i])
        assert torch.equal(step[0, 0], whole[i])


ROWS = [op for op in OPS if "attention" not in op.name and op.name != "advance_step_flashattn"]


@pytest.mark.parametrize("op", ROWS, ids=lambda op: op.name)
def test_required_invariance_holds_end_to_end(op: ir.IrOp) -> None:
    """With the trait required, every op gives the same bits in every row, with any provider."""
    tokens = tokens_of(Subject(op, "native"), 17)
    assert isinstance(tokens, Tokens)
    values = tokens.case.values
    with torch.no_grad(), ir.require("batch_invariant"):
        assert "batch_invariant" in op.dispatch(*values).traits
        whole = tuple_of(op(*values))
        for i in (0, 5, 16):
            alone = tuple_of(op(*tokens.some([i])))
            assert all(map(torch.equal, alone, tokens.of(whole, [i])))


@pytest.mark.parametrize("op", [ir.ops.linear, ir.ops.linear_w8a16], ids=lambda op: op.name)
def test_maps_of_many_tokens_need_not_go_row_by_row(op: ir.IrOp) -> None:
    if not op.impls["opweave_c"].supported:
        pytest.skip("no native module")
    x, *rest = op.generate_inputs(num_tokens=300)
    assert op.dispatch(x, *rest).provider == "opweave_c"
    with ir.require("batch_invariant"):
        assert op.dispatch(x, *rest).provider == "opweave_c_invariant"
        assert torch.equal(op(x[7:8].clone(), *rest)[0], op(x, *rest)[7])

"""Invalid arguments: every provider raises the documented error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ir.workloads import (
    check,
)
from opweave import ir

# Mistakes

X = torch.randn(2, 6)
Q, KV = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 8)
CU = torch.tensor([0, 3], dtype=torch.int32)


def dual_chunk(rows: int, chunk_size: int, local_size: int) -> tuple[Any, ...]:
    query, key = torch.randn(3, 16), torch.randn(3, 8)
    return query, key, torch.arange(3), torch.randn(rows, 8), 8, chunk_size, local_size


INVALID: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("silu_and_mul", (torch.randn(2, 5),), ValueError, "even"),
    ("silu_and_mul", (torch.tensor(1.0),), ValueError, "even"),
    ("mul_and_silu", (torch.randn(2, 5),), ValueError, "even"),
    ("gelu_and_mul", (torch.randn(2, 5),), ValueError, "even"),
    ("gelu_and_mul", (X, "exact"), ValueError, "must be 'none' or 'tanh', not 'exact'"),
    ("rms_norm", (X, None, 1e-6, 0), ValueError, "variance_size=0"),
    ("rms_norm", (X, None, 1e-6, 7), ValueError, "variance_size=7.*6"),
    ("rms_norm", (X[:0], None, 1e-6, 7), ValueError, "variance_size=7"),
    ("rms_norm", (X, None, 1e-6, -1), ValueError, "variance_size=-1"),
    ("fused_add_rms_norm", (X, X.clone(), None, 1e-6, 7), ValueError, "variance_size=7"),
    *(
        ("rms_norm", (X, weight, 1e-6), ValueError, "weight must have shape")
        for weight in (torch.ones(2, 6), torch.ones(1), torch.tensor(1.0))
    ),
    ("rms_norm", (X.long(), None, 1e-6), ValueError, "not floating point"),
    ("embedding", (torch.tensor([13]), torch.randn(13, 2)), IndexError, "index"),
    ("embedding", (torch.tensor([-1]), torch.randn(13, 2)), IndexError, "index"),
    ("apply_rotary_emb", (torch.randn(3, 2, 8), *[torch.randn(3, 5)] * 2), ValueError, "10.*8"),
    (
        "rotary_embedding",
        (torch.randn(3, 16), torch.randn(3, 8), torch.arange(3), torch.randn(9, 10), 8),
        ValueError,
        "10.*8",
    ),
    (
        "rotary_embedding_single",
        (torch.randn(3, 16), torch.arange(3), torch.randn(9, 10), 8),
        ValueError,
        "10.*8",
    ),
    ("dual_chunk_rotary_embedding", dual_chunk(11, 6, 6), ValueError, "local_size=6"),
    ("dual_chunk_rotary_embedding", dual_chunk(11, 6, -1), ValueError, "local_size=-1"),
    ("dual_chunk_rotary_embedding", dual_chunk(10, 6, 1), ValueError, "10 rows.*need 11"),
    ("bidirectional_attention", (Q, KV[:, :, :1].expand(1, 3, 3, 8), KV), ValueError, "heads"),
    ("causal_attention", (Q, KV[:, :, :1].expand(1, 3, 3, 8), KV), ValueError, "heads"),
    (
        "causal_attention",
        (Q, KV.repeat(1, 1, 2, 1)[:, :, :3], KV.repeat(1, 1, 2, 1)[:, :, :3]),
        ValueError,
        "4 query heads, 3 key heads",
    ),
    ("causal_attention", (Q, KV, KV, None, 0), ValueError, "window=0"),
    ("causal_attention", (Q[:0], KV[:0], KV[:0], None, -2), ValueError, "window=-2"),
    ("varlen_attention", (Q[0], KV[0], KV[0], CU, CU, None, True, 0), ValueError, "window=0"),
    ("varlen_attention", (Q[0], KV[0], KV[0], CU, CU, None, False, 2), ValueError, "causal=True"),
    ("varlen_attention", (Q[0], KV[0, :, :1].expand(3, 3, 8), KV[0], CU, CU), ValueError, "heads"),
    *(
        ("fused_add_rms_norm", (X, residual, None, 1e-6), ValueError, "x_residual must be .*2, 6")
        for residual in (X[0], X[:1], X[None], X.double(), X[:, :5])
    ),
    *(
        ("rms_norm_gated", (X, weight, None, 1e-6), ValueError, "weight must have shape")
        for weight in (torch.randn(1), torch.randn(2, 6), torch.randn(3, 2, 6), torch.tensor(1.0))
    ),
]

LONG = torch.randn(2, 7, 2, 8)
DENSE = [
    (Q, KV, LONG[:1]),  # a kernel that trusted the number of values would read beyond the keys
    (Q, KV, KV[:, :2]),
    (Q, LONG, LONG),
    (Q, KV, LONG[:, :3]),
    (Q, KV.repeat(1, 1, 1, 2), KV),
    (Q[0], KV[0], KV[0]),
    (Q, KV[0], KV[0]),
]
PACKED = [(q[0], k[0], v[0]) for q, k, v in (DENSE[0], DENSE[1], DENSE[4])]
FOUND = r"query, key and value must be \(.*q, query_heads, head_size\), .*; found \("
BOUNDS = [(CU, CU[:1]), (CU, CU.float()), (CU.bool(), CU), (CU[None], CU[None]), (CU[0], CU[0])]
INVALID += [
    *(("causal_attention", tensors, ValueError, FOUND) for tensors in DENSE),
    *(("bidirectional_attention", tensors, ValueError, FOUND) for tensors in DENSE),
    *(("varlen_attention", (*tensors, CU, CU), ValueError, FOUND) for tensors in PACKED),
    ("varlen_attention", (Q, KV, KV, CU, CU), ValueError, FOUND),
    *(
        ("varlen_attention", (Q[0], KV[0], KV[0], *bounds), ValueError, "cu_seqlens_q.*; found")
        for bounds in BOUNDS
    ),
    ("varlen_attention", (Q[0], KV[0], KV[0], CU[:0], CU[:0]), ValueError, "cu_seqlens_q is empty"),
]


@pytest.mark.parametrize(
    ("name", "values", "error", "match"),
    INVALID,
    ids=[f"{name}-{i}" for i, (name, *_) in enumerate(INVALID)],
)
def test_documented_errors_whoever_is_chosen(
    name: str, values: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    op = getattr(ir.ops, name)
    for provider in op.supported_providers():
        for call in (op.using(provider), op.torch_op):
            with (
                torch.no_grad(),
                ir.priority({name: [provider]}),
                pytest.raises(error, match=match),
            ):
                call(*values)


WRONG_WEIGHT = [torch.randn(5), torch.randn(6, 1), torch.randn(12)[:7]]


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
@pytest.mark.parametrize("weight", WRONG_WEIGHT, ids=["5", "6x1", "7"])
def test_a_weight_that_does_not_fit_never_reads_beyond_memory(name: str, weight: Tensor) -> None:
    """Providers that check less than native must at least agree with it, or raise."""
    op = getattr(ir.ops, name)
    values = (X,) * (2 if op.allow_inplace else 1) + (weight, 1e-6)
    try:
        expected = op.native(*values)
    except (RuntimeError, ValueError) as error:
        expected = error
    for provider in op.supported_providers():
        with torch.no_grad(), ir.priority({name: [provider]}):
            if isinstance(expected, Exception):
                with pytest.raises((RuntimeError, ValueError)):
                    op(*values)
            else:
                check(op, op(*values), expected, provider)

"""Arguments for the declared ops: sizes, options, omitted tensors, other dtypes, empty batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.conformance import Subject, inputs

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The other ops are tested with their kernels, in packages/opweave/tests/native.
FIRST_FAMILY = (
    "advance_step_flashattn", "apply_rotary_emb", "bidirectional_attention", "causal_attention",
    "dual_chunk_rotary_embedding", "embedding", "fused_add_rms_norm", "gelu_and_mul", "linear",
    "mla_attention_prefill", "mul_and_silu", "rms_norm", "rotary_embedding",
    "rotary_embedding_single", "silu_and_mul", "varlen_attention",
)  # fmt: skip
OPS = [getattr(ir.ops, name) for name in FIRST_FAMILY]
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).removeprefix("torch."))


# Inputs


def dense(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


# Options of the input generators; an op gets those that it has.
GENERATED: list[dict[str, Any]] = [
    *({"num_tokens": count} for count in (0, 1, 5)),
    *({"hidden_size": size} for size in (1, 7, 33)),
    *({"num_kv_heads": count} for count in (1, 4)),
    {"num_seqs": 3, "num_tokens": 7},
    {"num_seqs": 4, "num_tokens": 2},
    {"rotary_size": 8},
    {"rotary_size": 8, "split_heads": True},
    {"negative_positions": True},
    {"block_size": 7, "num_tokens": 33},
]


def generated(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for options in ({}, *GENERATED):
        case = inputs.generated(Subject(op, "native"), **options, dtype=dtype)
        if case is not None:
            yield case.values


def with_options(op: ir.IrOp) -> Iterator[tuple[Any, ...]]:
    """Arguments with other numbers, flags and dtypes, and without optional tensors."""
    subject = Subject(op, "native")
    for case in itertools.chain(
        inputs.options(subject), inputs.without(subject), inputs.mixed(subject)
    ):
        if case.refusal is None:
            yield case.values


def norms(op: ir.IrOp) -> Iterator[tuple[Any, ...]]:
    xs = [dense(2, 24, dtype=torch.float32) for _ in op.activations]
    for size in (1, 5, 24):
        yield (*xs, dense(24, dtype=torch.float32), 1e-6, size)
    yield (*(torch.zeros_like(x) for x in xs), None, 1e-6, None)


def lengths(*pairs: tuple[list[int], list[int]]) -> Iterator[tuple[int, Tensor, int, Tensor]]:
    for both in pairs:
        q, k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in both)
        yield int(q[-1]), q, int(k[-1]), k


LENGTHS = [([2, 0, 3], [4, 5, 1]), ([2, 3], [0, 3]), ([], [])]


def packed(op: ir.IrOp) -> Iterator[tuple[Any, ...]]:
    """Empty sequences, sequences without keys, and two tokens after the last sequence."""
    for q_count, cu_q, k_count, cu_k in lengths(*LENGTHS):
        query = torch.randn(q_count + 2, 4, 16)
        key, value = torch.randn(2, k_count + 2, 2, 16)
        for causal, window in ((True, None), (True, 3), (False, None)):
            yield op.bind(query, key, value, cu_q, cu_k, causal=causal, window=window)


def latent(op: ir.IrOp) -> Iterator[tuple[Any, ...]]:
    weight = torch.randn(4 * (8 + 6), 10) / 10**0.5
    for q_count, cu_q, k_count, cu_k in lengths(*LENGTHS):
        kv_c, k_pe = torch.randn(k_count + 2, 10), torch.randn(k_count + 2, 4)
        yield torch.randn(q_count + 2, 4, 12), kv_c, k_pe, weight, cu_q, cu_k, 0.3, True


def attention(op: ir.IrOp) -> Iterator[tuple[Any, ...]]:
    """More queries than keys, no keys, no batch, and values of another size."""
    for batch, q, k, heads, kv in [(2, 6, 2, 2, 2), (1, 4, 0, 2, 1), (0, 3, 3, 2, 2)]:
        query, key = torch.randn(batch, q, heads, 16), torch.randn(batch, k, kv, 16)
        yield op.bind(query, key, torch.randn(batch, k, kv, 8))


def matrices(op: ir.IrOp) -> Iterator[tuple[Any, ...]]:
    """A token without its dimension, and two token dimensions."""
    first, *rest = op.generate_inputs()
    for shape in ((), (2, 4), (2, 0)):
        count = 1 if not shape else shape[0] * shape[1]
        yield first[:count].reshape((*shape, *first.shape[1:])), *rest


SPECIAL: dict[str, Callable[[ir.IrOp], Iterator[tuple[Any, ...]]]] = {
    "rms_norm": norms,
    "fused_add_rms_norm": norms,
    "varlen_attention": packed,
    "mla_attention_prefill": latent,
    "causal_attention": attention,
    "bidirectional_attention": attention,
    **dict.fromkeys(
        ("silu_and_mul", "mul_and_silu", "gelu_and_mul", "linear", "embedding"), matrices
    ),
}


def special(op: ir.IrOp) -> Iterator[tuple[Any, ...]]:
    return SPECIAL[op.name](op) if op.name in SPECIAL else iter(())


def tuple_of(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def check(
    op: ir.IrOp,
    found: Any,
    expected: Any,
    what: object = "",
    values: Any = (),
    provider: str | None = None,
) -> None:
    """Compare outputs within the tolerance of the op or *provider*: values, shapes and dtypes.

    An op that rounds to the dtype of one of its *values* on the way is no more exact than that.
    """
    floats = [v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    for a, b in zip(tuple_of(found), tuple_of(expected), strict=True):
        coarsest = b.dtype
        if b.is_floating_point():
            coarsest = max([b.dtype, *floats], key=lambda d: torch.finfo(d).eps)
        atol, rtol = op.get_tolerance(coarsest, provider)
        torch.testing.assert_close(
            a, b, atol=atol, rtol=rtol, equal_nan=True, msg=lambda m: f"{what}\n{m}"
        )


def accepts(op: ir.IrOp, provider: str, values: tuple[Any, ...]) -> bool:
    return op.impls[provider].rejection(op.bind(*values)) is None

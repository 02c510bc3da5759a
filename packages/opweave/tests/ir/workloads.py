"""Arguments for every declared op: shapes, layouts, options, None variants, empty batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The other ops are tested with their kernels, in packages/opweave/tests/native.
FIRST_FAMILY = (
    "advance_step_flashattn",
    "apply_rotary_emb",
    "bidirectional_attention",
    "causal_attention",
    "dual_chunk_rotary_embedding",
    "embedding",
    "fused_add_rms_norm",
    "gelu_and_mul",
    "linear",
    "mla_attention_prefill",
    "mul_and_silu",
    "rms_norm",
    "rotary_embedding",
    "rotary_embedding_single",
    "silu_and_mul",
    "varlen_attention",
)
OPS = [getattr(ir.ops, name) for name in FIRST_FAMILY]
PAIRS = [(op, provider) for op in OPS for provider in op.supported_providers()]
IDS = [f"{op.name}-{provider}" for op, provider in PAIRS]
each_provider = pytest.mark.parametrize(("op", "provider"), PAIRS, ids=IDS)
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).removeprefix("torch."))


# Inputs


def dense(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


def sliced(t: Tensor) -> Tensor:
    """The same values in rows of a wider tensor."""
    return torch.cat([t, torch.full_like(t, float("nan"))], -1)[..., : t.shape[-1]] if t.ndim else t


def transposed(t: Tensor) -> Tensor:
    """The same values with the last two dimensions exchanged in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.ndim > 1 else t


def expanded(t: Tensor) -> Tensor:
    """One row repeated without memory of its own."""
    return t[:1].expand(t.shape) if t.ndim > 1 and t.shape[0] else t


def offset(t: Tensor) -> Tensor:
    """The same values one element into their storage: not aligned to anything."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "sliced": sliced,
    "transposed": transposed,
    "expanded": expanded,
    "offset": offset,
}


def norm_inputs(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    shapes = [(3, 64), (0, 64), (2, 3, 24), (769,), (5, 1), (2, 7), (1, 1, 1, 33)]
    for i, (shape, with_weight) in enumerate(itertools.product(shapes, (True, False))):
        xs = [dense(*shape, dtype=dtype) for _ in range(2 if op.allow_inplace else 1)]
        weight = dense(shape[-1], dtype=dtype) if with_weight else None
        yield (*xs, weight, (1e-6, 1e-5, 0.1)[i % 3], None)
    for size in (1, 5, 24):
        xs = [dense(2, 24, dtype=dtype) for _ in range(2 if op.allow_inplace else 1)]
        yield (*xs, dense(24, dtype=dtype), 1e-6, size)
    for other in (torch.float32, torch.bfloat16):  # a weight of another dtype
        xs = [dense(4, 48, dtype=dtype) for _ in range(2 if op.allow_inplace else 1)]
        yield (*xs, dense(48, dtype=other), 1e-6, None)
    zeros = [torch.zeros(2, 16, dtype=dtype) for _ in range(2 if op.allow_inplace else 1)]
    yield (*zeros, dense(16, dtype=dtype), 1e-6, None)


def gated_inputs(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in [(3, 64), (0, 64), (2, 3, 26), (14,), (4, 0), (1, 2)]:
        x = dense(*shape, dtype=dtype)
        yield from [(x, "none"), (x, "tanh"), (x,)] if op.name == "gelu_and_mul" else [(x,)]
    yield (dense(3, 8, dtype=dtype) * 6,)


def linear_inputs(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape, out in [((3, 64), 32), ((0, 64), 32), ((2, 3, 24), 5), ((17,), 8), ((4, 1), 1)]:
        weight = dense(out, shape[-1], dtype=dtype) / shape[-1] ** 0.5
        for bias in (dense(out, dtype=dtype), None):
            yield dense(*shape, dtype=dtype), weight, bias


def embedding_inputs(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    weight = dense(13, 24, dtype=dtype)
    for shape, ids in itertools.product([(7,), (2, 3), (0,), ()], [torch.int64, torch.int32]):
        yield torch.randint(13, shape, dtype=ids), weight


def rotary_inputs(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for neox, rotated, shape in itertools.product(
        (True, False), (16, 8), [(5, 3, 16), (2, 5, 3, 16), (0, 3, 16)]
    ):
        angles = torch.rand(shape[-3], rotated // 2) * 6.3
        cos, sin = angles.cos(), angles.sin()
        for in_float32 in (False, True):
            kept = torch.float32 if in_float32 else dtype
            yield dense(*shape, dtype=dtype), cos.to(kept), sin.to(kept), neox, in_float32
        yield dense(*shape, dtype=dtype), cos, sin  # defaults, and cos of another dtype


def rotary_embedding_inputs(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for neox, rotated, (positions, flat) in itertools.product(
        (True, False),
        (16, 8),
        [((5,), True), ((5,), False), ((2, 3), True), ((2, 3), False), ((0,), True)],
    ):
        angles = torch.rand(20, rotated // 2) * 6.3
        for kept in {dtype, torch.float32}:
            cache = torch.cat((angles.cos(), angles.sin()), -1).to(kept)
            last = [(4 * 16,), (2 * 16,)] if flat else [(4, 16), (2, 16)]
            if positions == (0,) and not flat:
                continue
            query, key = (dense(*positions, *end, dtype=dtype) for end in last)
            yield query, key, torch.randint(20, positions), cache, 16, neox


def rotary_single_inputs(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for query, _, *rest in rotary_embedding_inputs(op, dtype):
        yield query, *rest


def dual_chunk_inputs(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for i, (query, key, positions, *_, neox) in enumerate(rotary_embedding_inputs(op, dtype)):
        chunk, local = ((8, 3), (8, 0), (6, 5))[i % 3]
        angles = torch.rand(2 * chunk - local, (4, 8)[i % 2]) * 6.3
        cache = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
        yield query, key, 3 * positions, cache, 16, chunk, local, neox


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3},
    {"window": 1},
    {"window": 3},
    {"window": 100},
    {"soft_cap": 2.0},
    {"scale": 1.0, "window": 2, "soft_cap": 0.5},
]


def causal_inputs(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    sizes = [
        (2, 5, 5, 4, 2),
        (1, 1, 7, 3, 3),
        (1, 3, 8, 4, 1),
        (2, 6, 2, 2, 2),
        (1, 4, 0, 2, 1),
        (0, 3, 3, 2, 2),
        (1, 0, 4, 2, 2),
    ]
    for i, (batch, q, k, heads, kv) in enumerate(sizes):
        for options in OPTIONS if i < 4 else OPTIONS[:1]:
            query = dense(batch, q, heads, 16, dtype=dtype)
            key = dense(batch, k, kv, 16, dtype=dtype)
            value = dense(batch, k, kv, 8, dtype=dtype)  # of another size
            yield op.bind(query, key, value, **options)


def bidirectional_inputs(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for query, key, value, scale, window, soft_cap in causal_inputs(ir.ops.causal_attention, dtype):
        if window is None and soft_cap is None:
            yield query, key, value, scale


def varlen_inputs(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    lengths = [
        ([3, 1, 4], [3, 1, 4]),
        ([1, 2], [6, 2]),
        ([2, 0, 3], [4, 5, 1]),
        ([2, 3], [0, 3]),
        ([], []),
    ]
    for i, (q_lens, k_lens) in enumerate(lengths):
        for options in OPTIONS if i < 3 else OPTIONS[:1]:
            for causal in (True, False) if "window" not in options else (True,):
                cu_q, cu_k = (
                    torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32)
                    for n in (q_lens, k_lens)
                )
                padding = 2 if i == 1 else 0  # tokens after the last sequence
                query = dense(sum(q_lens) + padding, 4, 16, dtype=dtype)
                key = dense(sum(k_lens) + padding, 2, 16, dtype=dtype)
                value = dense(sum(k_lens) + padding, 2, 16, dtype=dtype)
                yield op.bind(query, key, value, cu_q, cu_k, causal=causal, **options)


def advance_step_inputs(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # Integers only: the dtype of the other ops says nothing here.
    for num_tokens, index in itertools.product((0, 1, 5, 33), (torch.int32, torch.int64)):
        yield op.generate_inputs(num_tokens=num_tokens, block_size=7, dtype=index)


def mla_prefill_inputs(op: ir.IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    lengths = [([3, 1, 4], [3, 1, 4]), ([1, 2], [6, 2]), ([2, 3], [0, 3]), ([], [])]
    for i, (q_lens, k_lens) in enumerate(lengths):
        for scale, causal in [(None, True), (0.3, False), (1.0, True)]:
            cu_q, cu_k = (
                torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32)
                for n in (q_lens, k_lens)
            )
            padding = 2 if i == 1 else 0  # tokens after the last sequence
            query = dense(sum(q_lens) + padding, 4, 12, dtype=dtype)
            kv_c = dense(sum(k_lens) + padding, 10, dtype=dtype)
            k_pe = dense(sum(k_lens) + padding, 4, dtype=dtype)
            weight = dense(4 * (8 + 6), 10, dtype=dtype) / 10**0.5
            yield query, kv_c, k_pe, weight, cu_q, cu_k, scale, causal


INPUTS: dict[str, Callable[[ir.IrOp, torch.dtype], Iterator[tuple[Any, ...]]]] = {
    "advance_step_flashattn": advance_step_inputs,
    "rms_norm": norm_inputs,
    "fused_add_rms_norm": norm_inputs,
    "silu_and_mul": gated_inputs,
    "mul_and_silu": gated_inputs,
    "gelu_and_mul": gated_inputs,
    "linear": linear_inputs,
    "embedding": embedding_inputs,
    "apply_rotary_emb": rotary_inputs,
    "rotary_embedding": rotary_embedding_inputs,
    "rotary_embedding_single": rotary_single_inputs,
    "dual_chunk_rotary_embedding": dual_chunk_inputs,
    "bidirectional_attention": bidirectional_inputs,
    "causal_attention": causal_inputs,
    "varlen_attention": varlen_inputs,
    "mla_attention_prefill": mla_prefill_inputs,
}


def tuple_of(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def check(op: ir.IrOp, found: Any, expected: Any, what: object = "", values: Any = ()) -> None:
    """Compare outputs within the op's tolerance: values, shapes and dtypes.

    An op that rounds to the dtype of one of its *values* on the way is no more exact than that.
    """
    floats = [v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    for a, b in zip(tuple_of(found), tuple_of(expected), strict=True):
        coarsest = b.dtype
        if b.is_floating_point():
            coarsest = max([b.dtype, *floats], key=lambda d: torch.finfo(d).eps)
        atol, rtol = op.get_tolerance(coarsest)
        torch.testing.assert_close(
            a,
            b,
            atol=atol,
            rtol=rtol,
            equal_nan=True,
            msg=lambda m: f"{what}\n{m}",
        )


def accepts(op: ir.IrOp, provider: str, values: tuple[Any, ...]) -> bool:
    return op.impls[provider].rejection(op.bind(*values)) is None


def laid_out(op: ir.IrOp, values: tuple[Any, ...], layout: str) -> tuple[Any, ...]:
    """Lay out the floating-point arguments as *layout* says, but for rank 1."""
    change = LAYOUTS[layout]
    return tuple(
        change(v) if isinstance(v, Tensor) and v.is_floating_point() and v.ndim > 1 else v
        for v in values
    )

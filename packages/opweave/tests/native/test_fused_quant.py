"""A fused kernel gives what its composition gives: bit by bit that of opweave_c's own kernels."""

from __future__ import annotations

import random as python_random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import IrOp
from opweave.ir.ops import fused_quant as ops
from opweave.kernels.opweave_c import activation, norm
from opweave.kernels.opweave_c import quant as kernels

from .oracle import DTYPES, FP8, as_tuple, layout, ours, random, same_bits, weight_for

NORMS = [
    ops.rms_norm_static_quant_fp8,
    ops.rms_norm_dynamic_per_token_quant_fp8,
    ops.rms_norm_dynamic_per_token_quant_int8,
]
ADDS = [
    ops.fused_add_rms_norm_static_quant_fp8,
    ops.fused_add_rms_norm_dynamic_per_token_quant_fp8,
    ops.fused_add_rms_norm_dynamic_per_token_quant_int8,
]
GATED = [
    ops.silu_and_mul_static_quant_fp8,
    ops.silu_and_mul_dynamic_per_token_quant_fp8,
    ops.silu_and_mul_dynamic_per_token_quant_int8,
    ops.silu_and_mul_per_token_group_quant_fp8,
]
# Beyond 8192 a row or a group does not fit the kernels' buffer.
SHAPES = [(1, 64), (7, 770), (3, 5, 518), (64,), (0, 32), (4, 0), (3, 2), (2, 3, 2, 18), (2, 20006)]
Arguments = tuple[Any, ...]


def scheme_of(op: IrOp) -> tuple[str, str]:
    """``("rms_norm", "static_quant_fp8")``."""
    for first in ("fused_add_rms_norm", "rms_norm", "silu_and_mul"):
        if op.name.startswith(first):
            return first, op.name.removeprefix(first + "_")
    raise AssertionError(op)


def composed(op: IrOp, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the results of opweave_c's kernels for the parts, one after the other."""
    first, second = scheme_of(op)
    quantize = getattr(kernels, second)
    if first == "silu_and_mul":
        return as_tuple(quantize(activation.silu_and_mul(arguments[0]), *arguments[1:]))
    if first == "rms_norm":
        return as_tuple(quantize(norm.rms_norm(*arguments[:3]), *arguments[3:]))
    x, residual = arguments[0].clone(), arguments[1].clone()
    y, total = norm.fused_add_rms_norm(x, residual, *arguments[2:4])
    return (*as_tuple(quantize(y, *arguments[4:])), total)


def arguments_for(op: IrOp, x: Tensor, weight: Tensor | None = None, seed: int = 7) -> Arguments:
    """Arguments with x, and others that fit it."""
    pick = python_random.Random(seed)
    first, second = scheme_of(op)
    found: list[Any] = [x]
    if first == "fused_add_rms_norm":
        found.append(random(*x.shape, dtype=x.dtype, seed=seed + 1))
    if first != "silu_and_mul":
        found += [weight, 1e-6]
    if second == "static_quant_fp8":
        found.append(torch.full(pick.choice([(), (1,), (1, 1)]), pick.choice([0.02, 0.003])))
    elif second == "dynamic_per_token_quant_fp8":
        found.append(pick.choice([None, torch.tensor([1.5])]))
    elif second == "per_token_group_quant_fp8":
        found += [pick.choice([1, 7, 64, 128, 3000]), pick.random() < 0.5]
    return tuple(found)


def check(op: IrOp, *arguments: Any) -> tuple[Tensor, ...]:
    found = ours(op, *arguments)
    for mine, theirs in zip(found, composed(op, *arguments), strict=True):
        assert same_bits(mine, theirs), (op.name, mine, theirs)
        assert layout(mine) == layout(theirs)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("op", "weight_kind"),
    [(op, kind) for op in NORMS + ADDS for kind in ("none", "same", "float32")]
    + [(op, "none") for op in GATED],
    ids=lambda value: getattr(value, "name", value),
)
def test_is_its_composition(
    module: ModuleType, isa: str, op: IrOp, dtype: torch.dtype, weight_kind: str
) -> None:
    for seed, shape in enumerate(SHAPES):
        x = random(*shape, dtype=dtype, seed=seed)
        arguments = arguments_for(op, x, weight_for(weight_kind, shape[-1], dtype), seed)
        check(op, *arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_and_the_buffer(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    """Groups that fill the buffer several times, and groups beyond it with a shorter one last."""
    x = random(2, 2 * 20_003, dtype=dtype)
    for group_size in (1, 7, 128, 3000, 8192, 8193, 9000, 30_000):
        check(ops.silu_and_mul_per_token_group_quant_fp8, x, group_size, False)


def test_a_residual_of_other_strides(module: ModuleType) -> None:
    op = ops.fused_add_rms_norm_static_quant_fp8
    wide = random(3, 4, 60, dtype=torch.float32)
    scale = torch.ones(1)
    with ir.priority(**{op.name: ["opweave_c"]}):
        inside = wide[..., :38]
        assert op.dispatch(inside, inside.contiguous(), None, 1e-6, scale).provider == "opweave_c"
        turned = wide.transpose(0, 1)
        other = turned.contiguous()
        assert op.dispatch(turned, other, None, 1e-6, scale).provider == "native"
    check(op, inside, inside.contiguous(), None, 1e-6, scale)


def test_the_sum_may_replace_an_operand(module: ModuleType, isa: str) -> None:
    x, residual = random(4, 77, dtype=torch.bfloat16), random(4, 77, dtype=torch.bfloat16, seed=3)
    wanted = ours(ops.fused_add_rms_norm_dynamic_per_token_quant_fp8, x, residual, None, 1e-6)
    for position in (0, 1):
        operands = [x.clone(), residual.clone()]
        out, scale = torch.empty(4, 77, dtype=FP8), torch.empty(4, 1)
        module.fused_add_rms_norm_per_token_quant(
            out, scale, operands[position], *operands, None, 1e-6, None
        )
        assert same_bits(out, wanted[0])
        assert torch.equal(scale, wanted[1])
        assert torch.equal(operands[position], wanted[2])
        assert torch.equal(operands[1 - position], (x, residual)[1 - position])

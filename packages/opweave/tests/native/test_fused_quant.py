"""A fused kernel gives what its composition gives: bit by bit that of opweave_c's own kernels."""

from __future__ import annotations

import random as python_random
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import IrOp
from opweave.ir.ops import fused_quant as ops
from opweave.ir.ops import quant as quant_ops
from opweave.kernels.opweave_c import activation, norm
from opweave.kernels.opweave_c import quant as fused
from opweave.kernels.opweave_c import quant as kernels

from . import oracle, quant_oracle
from .oracle import CALL_PATHS, DTYPES, call_path, random, using_threads, weight_for
from .quant_oracle import FP8, INT8, as_tuple, ours, same_bits, share_of_neighbors

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
OPS = NORMS + ADDS + GATED
# Beyond 8192 a row or a group does not fit the kernels' buffer.
SHAPES = [(1, 64), (7, 770), (3, 5, 518), (64,), (0, 32), (4, 0), (3, 2), (2, 3, 2, 18), (2, 20006)]
Arguments = tuple[Any, ...]


def native(op: IrOp, *arguments: Any) -> tuple[Tensor, ...]:
    """The composition, native all the way down."""
    inner = ("rms_norm", "fused_add_rms_norm", "silu_and_mul")
    scheme = op.name[op.name.index("quant") :]
    schemes = [name for name in vars(quant_ops) if name.endswith(scheme) and "quant" in name]
    with ir.priority(**{name: ["native"] for name in (*inner, *schemes)}):
        return as_tuple(op.impls["native"].impl_fn(*arguments))


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
        assert quant_oracle.layout(mine) == quant_oracle.layout(theirs)
    return found


def check_near_native(op: IrOp, *arguments: Any) -> None:
    x = arguments[0]
    results = zip(ours(op, *arguments), native(op, *arguments), strict=True)
    for position, (mine, theirs) in enumerate(results):
        assert quant_oracle.layout(mine) == quant_oracle.layout(theirs)
        if position == 0:
            # A few activations are the neighboring bfloat16 or float16, and a few of those cross
            # a boundary between codes.
            share = share_of_neighbors(mine, theirs)
            assert share <= 0.002 or share * mine.numel() <= 1, (op.name, share)
        else:
            assert mine.dtype == theirs.dtype
            unit = torch.finfo(x.dtype).eps
            torch.testing.assert_close(mine, theirs, rtol=max(unit, 1e-6), atol=0)


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
        if x.numel():
            check_near_native(op, *arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_and_the_buffer(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    """Groups that fill the buffer several times, and groups beyond it with a shorter one last."""
    x = random(2, 2 * 20_003, dtype=dtype)
    for group_size in (1, 7, 128, 3000, 8192, 8193, 9000, 30_000):
        check(ops.silu_and_mul_per_token_group_quant_fp8, x, group_size, False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [FP8, INT8], ids=str)
@pytest.mark.parametrize("path_name", CALL_PATHS)
def test_the_norm_is_the_definition(
    module: ModuleType, isa: str, path_name: str, out_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Against the norm in float64, row by row, and codes found in a table."""
    x, residual = random(5, 259, dtype=dtype), random(5, 259, dtype=dtype, seed=2)
    weight = weight_for("same", 259, dtype)
    y, total = oracle.fused_add_rms_norm(x, residual, weight, 1e-5)
    out, scale = torch.zeros(5, 259, dtype=out_dtype), torch.zeros(5, 1)
    sum_out = torch.zeros_like(x)
    run = call_path(module, path_name, "fused_add_rms_norm_per_token_quant")
    run(out, scale, sum_out, x, residual, weight, 1e-5, None)
    assert torch.equal(sum_out, total)
    for row, q, s in zip(y.double(), out, scale.flatten(), strict=True):
        expected = quant_oracle.scale_of(out_dtype, row.abs().max().item())
        assert s.item() == pytest.approx(expected, rel=1e-6)
        codes = quant_oracle.codes_for(out_dtype, quant_oracle.product(row, 1 / s.item()))
        wanted = torch.from_numpy(codes).to(torch.uint8).view(out_dtype)
        assert share_of_neighbors(q, wanted) <= 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path_name", CALL_PATHS)
def test_the_activation_is_the_definition(
    module: ModuleType, isa: str, path_name: str, dtype: torch.dtype
) -> None:
    x = random(6, 514, dtype=dtype) * 3
    gate, up = x[:, :257].double(), x[:, 257:]
    y = (gate * torch.sigmoid(gate)).to(dtype) * up
    out, scale = torch.zeros(6, 257, dtype=FP8), torch.zeros(6, 3)
    call_path(module, path_name, "silu_and_mul_group_quant_fp8")(out, scale, x, 100, False)
    wanted, wanted_scale = quant_ops.per_token_group_quant_fp8.impls["native"].impl_fn(y, 100)
    torch.testing.assert_close(scale, wanted_scale, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=0)
    assert share_of_neighbors(out, wanted) <= 0.005


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_special_values(module: ModuleType, isa: str, op: IrOp, dtype: torch.dtype) -> None:
    x = random(8, 38, dtype=dtype)
    x[1, 37] = torch.nan
    x[2, 3] = torch.inf
    x[3, 0] = -torch.inf
    x[4] = 0.0
    x[5] = torch.finfo(dtype).max
    x[6] = torch.finfo(dtype).tiny / 4
    found = check(op, *arguments_for(op, x))
    assert not found[0][[0, 4, 7]].float().isnan().any()


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    wide = random(3, 4, 60, dtype=dtype)
    return {
        "slice": wide[..., :38],
        "transposed": wide.transpose(0, 1),
        "transposed slice": wide.transpose(0, 1)[..., 6:40],
        "permuted": random(2, 3, 4, 6, dtype=dtype).permute(2, 0, 1, 3),
        "steps": wide[:, ::2, :38],
        "expanded": wide[:1].expand(3, 4, 60),
        "two columns": random(4, 8, dtype=dtype)[:, :2],
        "no rows": wide[:0],
    }


@pytest.mark.parametrize("layout", layouts(torch.float32))
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_layouts(module: ModuleType, op: IrOp, layout: str) -> None:
    for dtype in DTYPES:
        x = layouts(dtype)[layout]
        arguments = list(arguments_for(op, x))
        if op in ADDS:
            arguments[1] = x  # of the same strides
        for mine, theirs in zip(ours(op, *arguments), native(op, *arguments), strict=True):
            assert mine.shape == theirs.shape
            assert quant_oracle.layout(mine) == quant_oracle.layout(theirs)
        for mine, theirs in zip(ours(op, *arguments), composed(op, *arguments), strict=True):
            assert same_bits(mine, theirs)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_row_does_not_depend_on_the_batch(
    module: ModuleType, isa: str, op: IrOp, dtype: torch.dtype
) -> None:
    rows = 1101 if op in GATED else 301  # so many that each thread looks up what is activated
    x = random(rows, 2050, dtype=dtype)
    weight = weight_for("same", 2050, dtype)
    arguments = arguments_for(op, x, weight)
    with using_threads(2):
        whole = ours(op, *arguments)
    for row in (0, 150, rows - 1):
        operands = [a[row].clone() for a in arguments[: 2 if op in ADDS else 1]]
        alone = ours(op, *operands, *arguments[len(operands) :])
        for one, all_rows in zip(alone, whole, strict=True):
            assert same_bits(one, all_rows[row])


# Refusals


def refusals() -> dict[str, tuple[str, Arguments, str]]:
    x, q, s = torch.ones(4, 6), torch.empty(4, 6, dtype=FP8), torch.empty(4, 1)
    one, half = torch.ones(1), torch.empty(4, 3, dtype=FP8)
    token, static = "rms_norm_per_token_quant", "rms_norm_static_quant"
    add, silu = "fused_add_rms_norm_static_quant", "silu_and_mul_group_quant_fp8"
    y = torch.ones(4, 6)
    return {
        "dtype of x": (static, (q, x.double(), None, one, 1e-6), "x must be float32 or bfloat16"),
        "dtype of out": (static, (y, x, None, one, 1e-6), "out must be float8_e4m3fn or int8"),
        "weight": (static, (q, x, torch.ones(5), one, 1e-6), r"weight must be None or have shape"),
        "scale": (static, (q, x, None, s, 1e-6), "scale must have one element"),
        "scales": (token, (q, one, x, None, 1e-6, None), r"scale must have shape \[4, 1\]"),
        "bound": (token, (q, s, x, None, 1e-6, s), "scale_ub must be None or have one element"),
        "residual": (add, (q, y, x, y[:, :5], None, one, 1e-6), "residual must have the shape of"),
        "dtype of sum": (add, (q, y.half(), x, y, None, one, 1e-6), "residual_out must have the"),
        "overlap": (add, (q, y.view(-1)[:24].view(6, 4).t(), x, x, None, one, 1e-6), "contiguous"),
        "shared": (add, (x.view(FP8)[:, :6], y, x, y, None, one, 1e-6), "must not share memory"),
        "halves": (silu, (q, s, x, 3, False), "out must have the shape of x with half of its last"),
        "group size": (silu, (half, s, x, 0, False), "group_size must be at least 1"),
        "group scales": (silu, (half, s, x, 2, False), r"scale must have shape \[4, 2\]"),
        "group int8": (silu, (half.view(INT8), s, x, 3, False), "out must be float8_e4m3fn, found"),
    }


@pytest.mark.parametrize("case", refusals())
@pytest.mark.parametrize("path_name", CALL_PATHS)
def test_refusals(module: ModuleType, path_name: str, case: str) -> None:
    op, arguments, message = refusals()[case]
    with pytest.raises(RuntimeError, match=f"{op}: .*{message}"):
        call_path(module, path_name, op)(*arguments)


@pytest.mark.parametrize("op", [*GATED, NORMS[0], ADDS[0]], ids=lambda op: op.name)
def test_the_native_error_stays(module: ModuleType, op: IrOp) -> None:
    """opweave_c rejects arguments that native refuses, so that the op's error is raised."""
    if op in GATED:
        bad: Arguments = arguments_for(op, torch.ones(4, 5))
        message = "must be even"
    else:
        bad = (*arguments_for(op, torch.ones(4, 6))[:-1], torch.ones(5))
        message = "scale must have one element"
    with ir.priority(**{op.name: ["opweave_c"]}), pytest.raises(ValueError, match=message):
        op(*bad)


# Graphs


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_ir_op_is_a_torch_op(module: ModuleType, op: IrOp) -> None:
    arguments = op.generate_inputs(dtype=torch.bfloat16, num_tokens=3)
    torch.library.opcheck(cast("Any", op.torch_op), arguments)


def test_opcheck(module: ModuleType) -> None:
    x, q, s = torch.randn(3, 8), torch.empty(3, 8, dtype=FP8), torch.ones(3, 1)
    one, w, total = torch.ones(1), torch.ones(8), torch.empty(3, 8)
    residual, half = torch.randn(3, 8), torch.empty(3, 4, dtype=FP8)
    for out in (q, q.view(INT8)):
        for weight in (None, w):
            check_op = quant_oracle.opcheck
            check_op("rms_norm_static_quant", out, x, weight, one, 1e-6)
            check_op("rms_norm_per_token_quant", out, s, x, weight, 1e-6, one)
            add = "fused_add_rms_norm_"
            check_op(add + "static_quant", out, total, x, residual, weight, one, 1e-6)
            check_op(add + "per_token_quant", out, s, total, x, residual, weight, 1e-6, None)
    for out in (half, half.view(INT8)):
        quant_oracle.opcheck("silu_and_mul_static_quant", out, x, one)
        quant_oracle.opcheck("silu_and_mul_per_token_quant", out, s, x, None)
    quant_oracle.opcheck("silu_and_mul_group_quant_fp8", half, torch.ones(3, 2), x, 3, True)


def test_compiles_in_one_graph(module: ModuleType) -> None:
    x, residual = random(3, 24, dtype=torch.bfloat16), random(3, 24, dtype=torch.bfloat16, seed=1)
    function = fused.fused_add_rms_norm_dynamic_per_token_quant_fp8
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got = compiled(x, residual, None, 1e-6, None)
    for mine, wanted in zip(got, function(x, residual, None, 1e-6, None), strict=True):
        assert same_bits(mine, wanted)


# Anything


def check_case(module: ModuleType, isas: tuple[str, ...], seed: int) -> None:
    pick = python_random.Random(seed)
    module._select_isa(pick.choice(isas))
    dtype, op = pick.choice(DTYPES), pick.choice(OPS)
    leading = [pick.randint(0, 4) for _ in range(pick.randint(0, 3))]
    width = 2 * pick.choice([pick.randint(1, 40), pick.randint(1, 300)])
    whole = random(*leading, width + pick.choice([0, 4]), dtype=torch.float32, seed=seed)
    whole *= 10.0 ** pick.uniform(-4, 4)
    if pick.random() < 0.2 and whole.numel():
        special = pick.choice([torch.nan, torch.inf, -torch.inf])
        whole.view(-1)[pick.randrange(whole.numel())] = special
    x = whole.to(dtype)[..., :width]
    if pick.random() < 0.3 and len(leading) > 1 and op not in ADDS:
        x = x.transpose(0, 1)
    weight = weight_for(pick.choice(["none", "same", "float32"]), width, dtype, seed)
    try:
        check(op, *arguments_for(op, x, weight, seed))
    finally:
        module._select_isa(None)


@pytest.mark.parametrize("block", range(4))
def test_anything(module: ModuleType, isas: tuple[str, ...], block: int) -> None:
    for seed in range(block * 100, (block + 1) * 100):
        check_case(module, isas, seed)


@pytest.mark.slow
def test_anything_more(module: ModuleType, isa: str) -> None:
    for seed in range(1000, 11_000):
        check_case(module, (isa,), seed)

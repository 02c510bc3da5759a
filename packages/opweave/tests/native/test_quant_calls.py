"""Quantization takes any rows, refuses what it cannot do, and is safe in graphs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import IrOp
from opweave.ir.ops import quant as ops
from opweave.kernels.opweave_c import quant as provider

from . import quant_oracle as oracle
from .oracle import CALL_PATHS, DTYPES, call_path, random, using_threads
from .quant_oracle import FP8, INT8, OPS, check, native, ours, same_bits


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    wide = random(3, 4, 60, dtype=dtype)
    return {
        "contiguous": random(3, 4, 37, dtype=dtype),
        "one row": random(1, 64, dtype=dtype),
        "vector": random(64, dtype=dtype),
        "slice": wide[..., :37],
        "transposed": wide.transpose(0, 1),
        "transposed slice": wide.transpose(0, 1)[..., 5:40],
        "permuted": random(2, 3, 4, 5, dtype=dtype).permute(2, 0, 1, 3),
        "steps": wide[:, ::2, :37],
        "expanded": wide[:1].expand(3, 4, 60),
        "expanded inside": random(4, 1, 6, dtype=dtype).expand(4, 3, 6),
        "one column": random(4, 8, dtype=dtype)[:, :1],
        "no rows": wide[:0],
        "no columns": wide[..., :0],
    }


def arguments_for(op: IrOp, x: Tensor) -> tuple[object, ...]:
    if op in (ops.static_quant_fp8, ops.static_quant_int8):
        return x, torch.tensor([0.02])
    return (x, 16) if op is ops.per_token_group_quant_fp8 else (x,)


@pytest.mark.parametrize("layout", layouts(torch.float32))
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_layouts(module: ModuleType, op: IrOp, layout: str) -> None:
    for dtype in DTYPES:
        check(op, *arguments_for(op, layouts(dtype)[layout]))


def test_strided_output(module: ModuleType, isa: str) -> None:
    x = random(6, 4, 37, dtype=torch.bfloat16)
    base = torch.full((4, 6, 61), 9, dtype=INT8)
    out = base.transpose(0, 1)[..., 11:48]
    scale = torch.empty(6, 4, 1)
    module.dynamic_per_token_quant(out, scale, x, None)
    wanted = native(ops.dynamic_per_token_quant_int8, x)[0]
    assert torch.equal(out, wanted)
    outside = base.clone()
    outside.transpose(0, 1)[..., 11:48] = 9
    assert (outside == 9).all(), "wrote outside of out"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_batch(
    module: ModuleType, isa: str, op: IrOp, dtype: torch.dtype
) -> None:
    if op is ops.dynamic_per_tensor_quant_fp8:
        assert "batch_invariant" not in op.impls["opweave_c"].traits
        return
    x = random(301, 2049, dtype=dtype)
    with using_threads(2):
        whole = ours(op, *arguments_for(op, x))
    for row in (0, 150, 300):
        alone = ours(op, *arguments_for(op, x[row].clone()))
        for one, all_rows in zip(alone, whole, strict=True):
            assert same_bits(one, all_rows[row])


# Refusals


def refusals() -> dict[str, tuple[str, tuple[object, ...], str]]:
    x, q, s = torch.ones(4, 6), torch.empty(4, 6, dtype=FP8), torch.empty(4, 1)
    token, static = "dynamic_per_token_quant", "static_quant"
    group = "per_token_group_quant_fp8"
    wide = torch.empty(4, 12)
    return {
        "dtype of x": (token, (q, s, x.double(), None), "x must be float32 or bfloat16 or float16"),
        "dtype of out": (token, (x + 0, s, x, None), "out must be float8_e4m3fn or int8"),
        "shape of out": (token, (q[:, :5], s, x, None), "out must have the shape of x"),
        "columns of x": (token, (q, s, wide[:, ::2], None), "x must be contiguous in its last"),
        "columns of out": (static, (q.t(), x.t().contiguous(), s[0]), "out must be contiguous in"),
        "shape of scale": (token, (q, s.flatten(), x, None), r"scale must have shape \[4, 1\]"),
        "dtype of scale": (token, (q, s.double(), x, None), "scale must be float32"),
        "bound": (token, (q, s, x, s), "scale_ub must be None or have one element"),
        "blocks": (static, (q, x, torch.ones(3, 1)), "where a divides the 4 rows of x and b"),
        "1-d scale": (static, (q, x, torch.ones(6)), "scale must have one element, or shape"),
        "group size": (group, (q, s, x, 0, False), "group_size must be at least 1"),
        "group scales": (group, (q, s, x, 4, False), r"scale must have shape \[4, 2\]"),
        "group int8": (group, (q.view(INT8), s, x, 6, False), "out must be float8_e4m3fn, found"),
        "tensor scale": ("dynamic_per_tensor_quant_fp8", (q, s, x), "scale must have one element"),
        "overlap": (token, (x.view(INT8)[:, :6], s, x, None), "out is written and must not share"),
        "scalar": (static, (q[0, 0], x[0, 0], s[0]), "x must have at least one dimension"),
    }


@pytest.mark.parametrize("case", refusals())
@pytest.mark.parametrize("path_name", CALL_PATHS)
def test_refusals(module: ModuleType, path_name: str, case: str) -> None:
    op, arguments, message = refusals()[case]
    with pytest.raises(RuntimeError, match=f"{op}: .*{message}"):
        call_path(module, path_name, op)(*arguments)


def test_the_ops_refuse_with_value_errors(module: ModuleType) -> None:
    x = torch.ones(4, 6)
    calls: list[tuple[Callable[..., object], tuple[object, ...], str]] = [
        (
            ops.static_quant_fp8,
            (x, torch.ones(6)),
            r"scale must have one element, or shape \(a, b\)",
        ),
        (ops.static_quant_int8, (x, torch.ones(5, 1)), "a divides the rows of x"),
        (ops.per_token_group_quant_fp8, (x, 0), "group_size must be at least 1"),
        (ops.dynamic_per_token_quant_fp8, (torch.tensor(1.0),), "at least one dimension"),
        (ops.dynamic_per_token_quant_int8, (torch.tensor(1.0),), "at least one dimension"),
        (ops.dynamic_per_token_quant_fp8, (x, torch.ones(2)), "scale_ub must have one element"),
    ]
    for op, arguments, message in calls:
        assert isinstance(op, IrOp)
        with ir.priority(**{op.name: ["opweave_c"]}), pytest.raises(ValueError, match=message):
            op(*arguments)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("static_quant_fp8", ()),
        ("static_quant_int8", ()),
        ("dynamic_per_token_quant_fp8", ()),
        ("rms_norm_static_quant_fp8", (None, 1e-6)),
        ("silu_and_mul_static_quant_fp8", ()),
        ("linear_w8a16", (torch.arange(-24, 24, dtype=INT8).view(8, 6),)),
    ],
)
def test_a_scale_of_many_dimensions(
    module: ModuleType, name: str, others: tuple[object, ...]
) -> None:
    op, x, scale = getattr(ir.ops, name), random(4, 6, dtype=torch.float32), torch.tensor([0.25])
    wide = scale.view([1] * 9)
    assert op.dispatch(x, *others, wide).provider != "opweave_c"
    got, wanted = op(x, *others, wide), op(x, *others, scale)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.07, atol=0.1)


# Graphs


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_ir_op_is_a_torch_op(module: ModuleType, op: IrOp) -> None:
    for dtype in DTYPES:
        torch.library.opcheck(
            cast("Any", op.torch_op), op.generate_inputs(dtype=dtype, num_tokens=3)
        )


def test_opcheck(module: ModuleType) -> None:
    x, q, s = torch.randn(3, 8), torch.empty(3, 8, dtype=FP8), torch.ones(3, 1)
    oracle.opcheck("static_quant", q.view(INT8), x, torch.ones(1))
    oracle.opcheck("static_quant", q, x, s)
    oracle.opcheck("dynamic_per_token_quant", q.view(INT8), s, x, None)
    oracle.opcheck("dynamic_per_token_quant", q, s, x, torch.ones(1))
    oracle.opcheck("dynamic_per_tensor_quant_fp8", q, torch.ones(1), x)
    oracle.opcheck("per_token_group_quant_fp8", q, torch.ones(3, 2), x, 5, True)


def test_compiles_in_one_graph(module: ModuleType) -> None:
    x = random(3, 24, dtype=torch.bfloat16)
    function = provider.dynamic_per_token_quant_fp8
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for mine, wanted in zip(compiled(x, None), function(x, None), strict=True):
        assert same_bits(mine, wanted)

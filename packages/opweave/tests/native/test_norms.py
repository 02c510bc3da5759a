"""Norms: rounding, memory that kernels write, and rows whose squares vanish or overflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import IrOp
from opweave.kernels.opweave_c import activation, norm

from .oracle import DTYPES, FLUSHING, assert_op_close, random, using_threads, weight_for

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole rows": lambda base: base.flatten()[: 12 * 37].view(12, 37),
    "slice": lambda base: base[:, 3:40],
    "whole blocks": lambda base: base.flatten()[: 12 * 37].view(3, 4, 37),
    "slice of blocks": lambda base: base.view(3, 4, -1)[..., :37],
    "swapped blocks": lambda base: base.flatten()[: 12 * 37].view(4, 3, 37),
    "permuted leading dimensions": lambda base: base.view(3, 4, -1).transpose(0, 1)[..., :37],
    "some blocks": lambda base: base.flatten()[: 6 * 37].view(3, 2, 37),
    "rows that do not collapse": lambda base: base.view(3, 4, -1)[:, ::2, 1:38],
}
BASE = torch.empty(12, 61)


def assert_normalized(got: Tensor, x: Tensor, epsilon: float) -> None:
    """Compare with the RMS norm without a weight in float64, rounded once."""
    wanted = ir.ops.rms_norm.native(x.double(), None, epsilon).to(x.dtype)
    assert_op_close(ir.ops.rms_norm, got, wanted)


@pytest.mark.parametrize("magnitude", [1e-10, 1e-14, 1e-20])
def test_small_squares_count(module: ModuleType, isa: str, magnitude: float) -> None:
    """Instructions that multiply pairs of bfloat16 flush what is below 1.2e-38 to zero."""
    x = (random(3, 4096, dtype=torch.float32) * magnitude).to(torch.bfloat16)
    out = torch.empty_like(x)
    module.rms_norm(out, x, None, 0.0)
    assert_normalized(out, x, 0.0)


@pytest.mark.parametrize(
    ("layout", "out_layout"),
    [
        (a, b)
        for a, view in LAYOUTS.items()
        for b, out_view in LAYOUTS.items()
        if view(BASE).shape == out_view(BASE).shape
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows(module: ModuleType, dtype: torch.dtype, layout: str, out_layout: str) -> None:
    x, out_view = LAYOUTS[layout](random(12, 61, dtype=dtype)), LAYOUTS[out_layout]
    base = torch.full((12, 61), 9.0, dtype=dtype)
    out = out_view(base)
    untouched = base.clone()
    module.rms_norm(out, x, None, 1e-6)
    assert_normalized(out, x, 1e-6)
    out_view(untouched).copy_(out)
    assert torch.equal(base, untouched), "wrote outside of out"


def test_out_may_be_x(module: ModuleType, isa: str) -> None:
    x = random(5, 77, dtype=torch.bfloat16)
    for name, rest in (("rms_norm", (None, 1e-6)), ("layer_norm", (None, None, 1e-6))):
        out = x.clone()
        getattr(module, name)(out, out, *rest)
        assert torch.equal(out, getattr(norm, name)(x, *rest))


@pytest.mark.parametrize(("before", "gate"), [(False, "silu"), (True, "silu"), (True, "sigmoid")])
def test_out_may_be_x_or_the_gate(module: ModuleType, isa: str, before: bool, gate: str) -> None:
    for width in (77, 5000):
        x, z = random(2, 5, width, dtype=torch.bfloat16)
        wanted = norm.rms_norm_gated(x, None, z, 1e-5, None, before, gate)
        for out in (0, 1):
            pair = [x.clone(), z.clone()]
            rest = (1e-5, width, before, gate == "sigmoid")
            module.rms_norm_gated(pair[out], pair[0], None, pair[1], *rest)
            assert torch.equal(pair[out], wanted)


@pytest.mark.parametrize("kind", ["none", "same", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_whose_squares_vanish_is_infinite_without_epsilon(
    module: ModuleType, isa: str, dtype: torch.dtype, kind: str
) -> None:
    x = torch.full((2, 37), 1e-25, dtype=dtype)
    x[0, ::2] *= -1
    x[1, 5] = 1.0
    weight = weight_for(kind, 37, dtype)
    out = torch.empty_like(x)
    module.rms_norm(out, x, weight, 0.0)
    wanted = ir.ops.rms_norm.native(x, weight, 0.0)
    assert wanted[0].isinf().all()
    assert torch.equal(out[0], wanted[0])
    assert_op_close(ir.ops.rms_norm, out[1], wanted[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_rounds_as_in_torch(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = codes.view(dtype).view(256, 256).clone()
    residual = x.flip(0).roll(97, 1).contiguous() * 0.37
    total = (x.float() + residual.float()).to(dtype)
    module.fused_add_rms_norm(x, residual, None, 1e-6)
    is_compared = torch.ones_like(total, dtype=torch.bool)
    if isa in FLUSHING and dtype == torch.bfloat16:
        is_compared = ~(total.float().abs() < torch.finfo(dtype).tiny)
    same = (residual == total) | (residual.isnan() & total.isnan())
    assert same[is_compared].all()


def test_a_large_mean_costs_no_digits(module: ModuleType, isa: str) -> None:
    x = 4096 + random(4, 1000, dtype=torch.float32)
    wanted = torch.nn.functional.layer_norm(x.double(), (1000,), eps=0.0).float()
    got = norm.layer_norm(x, None, None, 0.0)
    torch.testing.assert_close(got, wanted, atol=2e-3, rtol=1e-5)


def test_nine_dimensions_are_left_to_native(module: ModuleType) -> None:
    x = torch.ones([1] * 7 + [2, 8])
    for op in (ir.ops.rms_norm, ir.ops.silu_and_mul):
        rest = (None, 1e-6) if op is ir.ops.rms_norm else ()
        with ir.priority({op.name: ["opweave_c"]}):
            assert op.dispatch(x, *rest).provider == "native"
            assert op.dispatch(x[0], *rest).provider == "opweave_c"
    found = ir.ops.fused_add_rms_norm.using("opweave_c")(x, x.clone(), None, 1e-6)
    assert found[0].shape == x.shape


# Activations: every 16-bit number, results that are looked up, and memory that kernels write.


@dataclass(frozen=True)
class Case:
    """An op with one set of arguments after x, and those of the C++ op."""

    name: str
    arguments: tuple[Any, ...] = ()
    of_module: tuple[Any, ...] = ()
    factor: int = 2  # the width of x over that of the result

    @property
    def op(self) -> IrOp:
        op: IrOp = getattr(ir.ops, self.name)
        return op

    def after_x(self, dtype: torch.dtype) -> tuple[Any, ...]:
        return tuple(a.to(dtype) if isinstance(a, Tensor) else a for a in self.arguments)

    def of_module_after_x(self, dtype: torch.dtype) -> tuple[Any, ...]:
        return tuple(a.to(dtype) if isinstance(a, Tensor) else a for a in self.of_module)


LEARNED = (torch.tensor([0.203]), torch.tensor([[-1.05]]))
GATED = [
    Case("silu_and_mul"),
    Case("mul_and_silu"),
    Case("gelu_and_mul", (), (False,)),
    Case("gelu_and_mul", ("tanh",), (True,)),
    Case("gelu_and_mul_sparse", (1.64485,), (1.64485, False)),
    Case("gelu_and_mul_sparse", (0.3, "tanh"), (0.3, True)),
    Case("fatrelu_and_mul", (0.5,), (0.5,)),
    Case("swigluoai_and_mul", (1.1, 0.9), (1.1, 0.9)),
]
POINTWISE = [
    Case("gelu_new", factor=1),
    Case("gelu_fast", factor=1),
    Case("quick_gelu", factor=1),
    Case("relu2", factor=1),
    Case("xielu", (*LEARNED, 0.25, -0.01), (*LEARNED, 0.25, -0.01), factor=1),
]
CASES = GATED + POINTWISE
IDS = [f"{case.name}-{i}" for i, case in enumerate(CASES)]
each_16_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
each_pointwise = pytest.mark.parametrize("case", POINTWISE, ids=lambda case: case.name)


def native(case: Case, x: Tensor) -> Tensor:
    result: Tensor = case.op.native(x, *case.after_x(x.dtype))
    return result


def provided(case: Case, x: Tensor) -> Tensor:
    result: Tensor = getattr(activation, case.name)(x, *case.after_x(x.dtype))
    return result


@each_16_bits
@each_pointwise
def test_every_16_bit_value(module: ModuleType, isa: str, case: Case, dtype: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = codes.view(dtype).view(256, 256)
    got, wanted = provided(case, x), native(case, x)
    if isa in FLUSHING and dtype == torch.bfloat16:  # flushes denormals
        normal = x.isnan() | (x.abs() >= 1e-30)
        got, wanted = got[normal], wanted[normal]
    assert_op_close(case.op, got, wanted)


@each_16_bits
@pytest.mark.parametrize("case", GATED, ids=IDS[: len(GATED)])
def test_every_16_bit_gate(module: ModuleType, isa: str, case: Case, dtype: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = codes.view(dtype).view(256, 256)
    ones = torch.ones_like(x)
    both = [x, ones] if case.name != "mul_and_silu" else [ones, x]
    interleaved = case.name == "swigluoai_and_mul"
    x = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    if case.name == "gelu_and_mul_sparse":  # statistics of numbers that are all finite and near
        x = x[(x.abs() <= 100).all(-1)]
    got, wanted = provided(case, x), native(case, x)
    if isa in FLUSHING and dtype == torch.bfloat16:
        normal = wanted.isnan() | (wanted.abs() >= 1e-30)
        got, wanted = got[normal], wanted[normal]
    assert_op_close(case.op, got, wanted, share=0 if case.name == "gelu_and_mul_sparse" else 0.9)


def any_numbers(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Every number of 16 bits, in rows that begin anywhere."""
    codes = torch.randint(-(2**15), 2**15, (rows, width + 9), dtype=torch.int16)
    return codes.view(dtype)[:, 4 : 4 + width]


def bits(x: Tensor) -> Tensor:
    """Of two NaN, which one their product is depends on the compiler."""
    return x.contiguous().view(torch.int16).masked_fill(x.isnan(), 0x7FFF)


# More than 2^19 elements are looked up, and these rows leave a rest of seven.
LOOKED_UP = (600, 1023)


@each_16_bits
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_row_does_not_depend_on_whether_results_are_looked_up(
    module: ModuleType, isa: str, case: Case, dtype: torch.dtype
) -> None:
    rows, width = LOOKED_UP
    x = any_numbers(rows, width * case.factor, dtype)
    with using_threads(1):
        whole = provided(case, x)
        pieces = torch.cat([provided(case, piece) for piece in x.split(rows // 3)])
    assert torch.equal(bits(whole), bits(pieces))


@each_16_bits
@each_pointwise
def test_the_output_of_an_activation_may_be_its_input(
    module: ModuleType, isa: str, case: Case, dtype: torch.dtype
) -> None:
    for shape in (LOOKED_UP, (5, 77)):
        x = any_numbers(*shape, dtype)
        with using_threads(1):
            wanted = provided(case, x)
            getattr(module, case.name)(x, x, *case.of_module_after_x(dtype))
        assert torch.equal(bits(x), bits(wanted))

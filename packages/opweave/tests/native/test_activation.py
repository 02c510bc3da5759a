"""Activations: every 16-bit number, results that are looked up, and memory that kernels write."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import IrOp
from opweave.kernels.opweave_c import activation

from .oracle import FLUSHING, assert_op_close, using_threads


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
def test_out_may_be_x(module: ModuleType, isa: str, case: Case, dtype: torch.dtype) -> None:
    for shape in (LOOKED_UP, (5, 77)):
        x = any_numbers(*shape, dtype)
        with using_threads(1):
            wanted = provided(case, x)
            getattr(module, case.name)(x, x, *case.of_module_after_x(dtype))
        assert torch.equal(bits(x), bits(wanted))

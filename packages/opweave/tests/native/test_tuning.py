"""Levels that differ only in their tuning give the same results, bit for bit."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import IrOp

from .conftest import ISAS
from .oracle import DTYPES

TUNED = {"zen4": "avx512bf16"}
OPS = sorted(
    name
    for name, op in ir.current_registry().ops.items()
    if "opweave_c" in op.impls and name != "advance_step_flashattn"
)  # of integers
# One row is prefetched ahead, or two; one step of vectors, or several and a rest.
SIZES: tuple[dict[str, int], ...] = ({}, {"num_tokens": 5, "hidden_size": 1096})
WHOLE_BLOCKS = {"linear_q": 1280}  # which hidden_size has to be


def results(op: IrOp, size: dict[str, int], dtype: torch.dtype) -> list[Tensor]:
    """Run *op* on inputs that depend only on these arguments; return what it wrote, too."""
    torch.manual_seed(7)
    known = inspect.signature(op.input_generator).parameters
    if "hidden_size" in size and op.name in WHOLE_BLOCKS:
        size = {**size, "hidden_size": WHOLE_BLOCKS[op.name]}
    size = {name: value for name, value in size.items() if name in known}
    given: Any = op.generate_inputs(**size, dtype=dtype)
    given = given if isinstance(given, tuple) else (given,)
    returned = op.impls["opweave_c"].impl_fn(*given)
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [value for value in (*given, *returned) if isinstance(value, Tensor)]


@pytest.mark.parametrize("tuned", TUNED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_tuning_does_not_change_results(
    module: ModuleType, isas: tuple[str, ...], name: str, dtype: torch.dtype, tuned: str
) -> None:
    if not {tuned, TUNED[tuned]} <= {*isas}:
        pytest.skip(f"{tuned} and {TUNED[tuned]} are not both compiled, or not supported")
    op = getattr(ir.ops, name)
    for size in SIZES:
        found = []
        for isa in (tuned, TUNED[tuned]):
            module._select_isa(isa)
            found.append(results(op, size, dtype))
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(
                mine.view(torch.uint8), other.view(torch.uint8), rtol=0, atol=0
            )


def test_a_tuned_level_comes_first_on_its_vendors_cpus_only() -> None:
    if not {"zen4", "avx512bf16"} <= {*ISAS}:
        pytest.skip("zen4 and avx512bf16 are not both compiled, or not supported")
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        is_amd = "AuthenticAMD" in file.read()
    assert (ISAS.index("zen4") < ISAS.index("avx512bf16")) == is_amd
    assert ISAS[-1] == "base"

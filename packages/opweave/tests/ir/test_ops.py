"""Every op: its definition against independent ones, in values, shapes and dtypes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ir import oracles
from ir.workloads import OPS, check, dense, each_dtype, generated, special, tuple_of, with_options
from opweave import ir

TESTS = Path(__file__).parents[1]


def test_every_declared_op_has_an_oracle() -> None:
    here = {op.name for op in OPS}
    files = [*(TESTS / "native").glob("test_*.py"), *(TESTS / "ir").glob("test_*.py")]
    others = "".join(p.read_text(encoding="utf-8") for p in files if p != Path(__file__))
    assert here <= set(ir.ops.__all__)
    assert [n for n in ir.ops.__all__ if n not in here and n not in others] == []
    for op in OPS:
        assert callable(getattr(oracles, op.name))


def check_definition(op: ir.IrOp, all_values: Iterable[tuple[Any, ...]]) -> None:
    """Compare native with the oracle; the conformance kit compares kernels with native."""
    oracle = getattr(oracles, op.name)
    for values in all_values:
        before = copy.deepcopy(values)
        result, shown = op.native(*values), ir.explain(op, *values).call
        check(op, result, oracle(*values), shown, values)
        for out, wanted in zip(tuple_of(result), oracle(*values), strict=True):
            assert out.dtype == wanted.dtype, shown
        for value, old in zip(values, before, strict=True):
            same = torch.equal(value, old) if isinstance(value, Tensor) else value == old
            assert same, f"{shown}: an input was changed"


each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@each_op
@each_dtype
def test_values(op: ir.IrOp, dtype: torch.dtype) -> None:
    check_definition(op, generated(op, dtype))


@each_op
def test_values_with_options_and_special_shapes(op: ir.IrOp) -> None:
    check_definition(op, itertools.chain(with_options(op), special(op)))


# Other people's code


@each_dtype
def test_rms_norm_is_that_of_llama(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    theirs.weight.data = dense(96, dtype=dtype)
    x = dense(4, 7, 96, dtype=dtype)
    with torch.no_grad():
        if dtype is not torch.float64:  # theirs computes float64 in float32
            assert torch.equal(ir.ops.rms_norm.native(x, theirs.weight, 1e-5), theirs(x))
        for provider in ir.ops.rms_norm.supported_providers():
            ours = ir.ops.rms_norm.using(provider)(x, theirs.weight, 1e-5)
            atol, rtol = ir.ops.rms_norm.get_tolerance(
                torch.float32 if dtype is torch.float64 else dtype
            )
            torch.testing.assert_close(ours, theirs(x), atol=atol, rtol=rtol)

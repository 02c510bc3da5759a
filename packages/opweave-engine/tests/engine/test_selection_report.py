"""Which kernels forwards run: seen once for each size of a forward."""

from __future__ import annotations

import pytest
import torch

from opweave import ir
from opweave_engine.metrics import KernelUse, SelectionReport


def forward(usage: SelectionReport, tokens: int, provider: str = "native") -> None:
    x = torch.randn(tokens, 8)
    with ir.priority(relu2=[provider]), usage.watch(tokens):
        ir.ops.relu2(ir.ops.relu2(x))


def test_each_size_is_seen_once() -> None:
    usage = SelectionReport()
    for tokens in (5, 1, 4, 7, 5, 8, 1):
        forward(usage, tokens)
    assert usage.kernels == tuple(KernelUse("relu2", "native", size, 2) for size in (1, 4, 8))


def test_what_is_not_seen_is_not_recorded() -> None:
    usage = SelectionReport()
    forward(usage, 3)
    with ir.record() as record:
        forward(usage, 2)
    assert record.selected_impls == {"relu2": {"native": 2}}
    with usage.watch(2):
        ir.ops.silu_and_mul(torch.randn(2, 8))
    assert {use.op for use in usage.kernels} == {"relu2"}


def test_a_forward_that_fails_is_seen_when_it_is_tried_again() -> None:
    usage = SelectionReport()
    with pytest.raises(ZeroDivisionError), usage.watch(2):
        raise ZeroDivisionError
    assert usage.kernels == ()
    forward(usage, 2)
    assert usage.kernels == (KernelUse("relu2", "native", 2, 2),)

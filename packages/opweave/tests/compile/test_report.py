"""Reports: source lines of the user's program, graphs without ops, and unintended gradients."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opweave.compile
import opweave_vllm.vllm_api.ir.ops as vllm_ops
from opweave import ir
from opweave.compile.report import MatchReport
from opweave.ir import selection
from opweave.ir.errors import GradientFallbackWarning
from opweave.layers import RMSNorm

from .conftest import compiled

BACKEND = "opweave.compile.backend"


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_warned", False)
    ir.ops.rms_norm.reset()  # its generated function looks at each implementation once
    monkeypatch.setattr(sys.modules[BACKEND], "_logged", False)


def test_a_model_without_ops(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "opweave"):
        for size in (4, 8):
            torch.compile(nn.Softplus(), backend="opweave")(torch.ones(2, size))
    report = opweave.compile.report()
    assert report.complete
    assert "0 opweave ops in this graph: it calls none" in str(report)
    assert caplog.text.count("0 opweave ops") == 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return ir.ops.silu_and_mul(ir.ops.rms_norm(x, self.weight, 1e-6))


def eager(model: nn.Module) -> Callable[..., Any]:
    return model


@pytest.mark.parametrize("prepare", [eager, compiled])
def test_gradients_that_keep_kernels_from_running_are_said_once(
    prepare: Callable[[nn.Module], Callable[..., Any]],
) -> None:
    run, x = prepare(Block()), torch.randn(4, 8)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with torch.no_grad():
            run(x)
        assert not warned
        with torch.enable_grad():
            run(x)
            run(x)
    (only,) = [w for w in warned if w.category is GradientFallbackWarning]
    assert "rms_norm runs native instead of opweave_c" in str(only.message)
    assert "torch.no_grad() or torch.inference_mode()" in str(only.message)


def test_the_report_says_that_gradients_are_on() -> None:
    with torch.enable_grad():
        compiled(Block())(torch.randn(4, 8))
    remark = "2 of 2 calls run differentiable implementations, usually native, because gradients"
    assert remark in str(opweave.compile.report())
    torch.compiler.reset()
    compiled(Block())(torch.randn(4, 8))
    assert opweave.compile.report().remarks == []


# The text


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return x + torch.relu(self.linear(normed))


def test_the_calls_of_identical_layers_are_printed_once_below_the_table() -> None:
    compiled(nn.Sequential(*(Layer() for _ in range(4))))(torch.randn(4, 8))
    heading, table, calls = str(opweave.compile.report()).split("\n\n")
    assert heading.startswith("8 calls of ops, ")
    assert [line.split() for line in table.splitlines()] == [
        ["op", "runs", "calls"],
        ["layer_norm", "opweave_c", "4"],
        ["linear", "opweave_c", "4"],
    ]
    norm, norm_source, linear, _ = calls.splitlines()
    assert norm.startswith("layer_norm [layer_norm_3] ×4 → opweave_c  (recognized in ")
    assert norm_source.endswith("normed: Tensor = self.norm(x)")
    assert linear.startswith("linear [linear_3] ×4 → opweave_c")


def test_near_misses_that_differ_in_the_numbers_of_nodes_are_printed_once() -> None:
    def miss(node: str, reason: str) -> MatchReport:
        return MatchReport("rms_norm", node, "rejected", reason, "/m.py:1: F")

    misses = [miss("mul", "operand 0 of add is sub, not mean")]
    misses += [miss(f"mul_{i}", f"operand 0 of add_{i} is sub_{i}, not mean") for i in (1, 2)]
    misses += [miss("mul_3", "operand 0 of add is 16, not 8")]
    text = str(opweave.compile.Report(complete=True, recognitions=misses))
    assert "rms_norm at mul ×3: operand 0 of add is sub, not mean\n    /m.py:1: F" in text
    assert "rms_norm at mul_3: operand 0 of add is 16, not 8" in text


# Source lines


LAYER = RMSNorm(8)
STACK = nn.Sequential(LAYER, nn.Identity())


def plain(x: Tensor) -> Tensor:
    return ir.ops.rms_norm(x, None, 1e-5)  # here


def at_a_call_site(x: Tensor) -> Tensor:
    return ir.ops.rms_norm.using("native")(x, None, 1e-5)  # here


def through_the_vllm_adapter(x: Tensor) -> Tensor:
    found: Tensor = vllm_ops.rms_norm(x, None, 1e-5)  # here
    return found


def donating_through_the_vllm_adapter(x: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = vllm_ops.fused_add_rms_norm.maybe_inplace(  # here
        x * 2, x + 1, None, 1e-5
    )
    return found


def in_a_layer(x: Tensor) -> Tensor:
    found: Tensor = LAYER(x)  # here
    return found


def in_a_module_of_torch(x: Tensor) -> Tensor:
    found: Tensor = STACK(x)  # here
    return found


@pytest.mark.parametrize("mode", [nullcontext(), torch.device("cpu")], ids=["plain", "device"])
@pytest.mark.parametrize(
    "function",
    [
        plain,
        at_a_call_site,
        through_the_vllm_adapter,
        donating_through_the_vllm_adapter,
        in_a_layer,
        in_a_module_of_torch,
    ],
)
def test_a_source_line_is_the_users(
    function: Callable[[Tensor], object], mode: AbstractContextManager[object]
) -> None:
    with mode:
        run = compiled(function)
        run(torch.randn(4, 8))
    sources = {node.source for node in opweave.compile.report().nodes}
    assert len(sources) == 1
    source = sources.pop()
    assert source.startswith(f"{__file__}:")
    assert source.endswith("# here")

"""Donation: what is given up may be reused, and reading it afterwards is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opweave.compile
from opweave import ir
from opweave.compile import Report

from .blocks import BLOCKS, Model, OpCalls, model_inputs

WEIGHT = torch.ones(8)
EAGERLY = {"codegen": False}
add_norm = ir.ops.fused_add_rms_norm


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(
        function,
        backend=opweave.compile.backend,
        fullgraph=True,
        options={**EAGERLY, **options},
    )


def reads_the_tensor(x: Tensor, r: Tensor) -> Any:
    y, _ = add_norm.maybe_inplace(x * 1, r, WEIGHT, 1e-5)
    return y + r  # read


def reads_a_view(x: Tensor, r: Tensor) -> Any:
    seen = r.view(-1)
    y, _ = add_norm.maybe_inplace(x * 1, r, WEIGHT, epsilon=1e-5)
    return y.sum() + seen[3]  # read


def reads_the_base(x: Tensor, r: Tensor) -> Any:
    base = x * 2
    y, _ = add_norm.maybe_inplace(base[1:], r[1:].clone(), WEIGHT, 1e-5)
    return y.sum() + base.sum()  # read


def donates_twice(x: Tensor, r: Tensor) -> Any:
    add_norm.maybe_inplace(x.clone(), r, WEIGHT, 1e-5)
    return add_norm.maybe_inplace(x.clone(), r, WEIGHT, 1e-5)  # read


def call_site(x: Tensor, r: Tensor) -> Any:
    y, _ = add_norm.using("native").maybe_inplace(x.clone(), x_residual=r, weight=None, epsilon=1.0)
    return y * r  # read


@pytest.mark.parametrize(
    "function", [reads_the_tensor, reads_a_view, reads_the_base, donates_twice, call_site]
)
def test_reading_what_was_given_up_names_both_lines(function: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="used again") as caught:
        compiled(function)(torch.randn(4, 8), torch.randn(4, 8))
    text = str(caught.value)
    first = function.__code__.co_firstlineno
    lines = [int(n) for n in re.findall(r"test_donation\.py:(\d+)", text)]
    assert len(lines) == 2, text
    assert first < lines[0] <= lines[1]
    assert "maybe_inplace" in text.split("donated:")[1].split("\n")[0]
    assert "Call fused_add_rms_norm itself" in text


def test_returning_what_was_given_up() -> None:
    def function(x: Tensor, r: Tensor) -> Any:
        given = r * 2
        y, _ = add_norm.maybe_inplace(x * 1, given, WEIGHT, 1e-5)
        return y, given

    with pytest.raises(Exception, match="it is returned"):
        compiled(function)(torch.randn(4, 8), torch.randn(4, 8))


def test_slices_that_do_not_touch_are_apart() -> None:
    cache = torch.randn(16, 8)
    positions = torch.arange(4)

    def function(x: Tensor) -> Any:
        q, k, v = (x * 1).split([8, 8, 8], -1)
        q, k = ir.ops.rotary_embedding.maybe_inplace(q, k, positions, cache, 8)
        return q * 1, k * 1, v * 2

    x = torch.randn(4, 24)
    expected = function(x)
    for found, wanted in zip(compiled(function)(x), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    (node,) = opweave.compile.report().nodes
    assert node.chosen == "opweave_c"


def test_a_donated_input_is_reused_and_no_other_changes() -> None:
    def function(x: Tensor, r: Tensor) -> Any:
        return add_norm.maybe_inplace(x * 2, r, WEIGHT, 1e-5)

    x, r = torch.randn(4, 8), torch.randn(4, 8)
    expected, kept = function(x, r.clone()), x.clone()
    y, s = compiled(function)(x, r)
    torch.testing.assert_close((y, s), tuple(expected))
    assert s.data_ptr() == r.data_ptr()
    assert torch.equal(x, kept)


def test_donated_inputs_that_overlap_are_copied_first() -> None:
    def function(x: Tensor, r: Tensor) -> Any:
        return add_norm.maybe_inplace(x, r, WEIGHT, 1e-5)

    run = compiled(function)
    run(torch.randn(4, 8), torch.randn(4, 8))  # compiled for inputs that are apart
    base = torch.randn(5, 8)
    expected = add_norm(base[:4].clone(), base[1:].clone(), WEIGHT, 1e-5)
    found = run(base[:4], base[1:])
    torch.testing.assert_close(tuple(found), tuple(expected))


def copies(report: Report) -> list[str]:
    return [
        f"{n.node}.{r.activation}: {r.reason}" for n in report.nodes for r in n.reuse if r.reason
    ]


def test_the_residual_stream_lives_in_one_buffer() -> None:
    model = Model(BLOCKS["llama"], 3, OpCalls())
    inputs = model_inputs(8)
    expected = model(*inputs)
    found = compiled(model)(*inputs)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    report = opweave.compile.report()
    assert copies(report) == []
    final = report.passes[-2].after
    kernels = re.findall(r"fused_add_rms_norm\.default\(\w+, (\w+), ", final)
    assert len(kernels) == 7
    assert len(set(kernels)) == 1, "every layer adds to the same residual"

"""Graphs on the device: the pass, Inductor's code, and the report."""

from __future__ import annotations

import acme_device
import pytest
import torch
from torch import Tensor

from opweave import compile as opweave_compile
from opweave import ir


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch.compiler.reset()


def block(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return residual + ir.ops.rms_norm(x, weight, 1e-6) * 0.25


def test_the_pass_puts_the_op_in() -> None:
    x, residual = torch.randn(2, 6, 32).to("acme")
    weight = torch.randn(32).to("acme")
    expected = block(x, residual, weight)
    acme_device.reset_fallbacks()
    compiled = torch.compile(block, backend="opweave")
    assert torch.equal(compiled(x, residual, weight).cpu(), expected.cpu())
    assert acme_device.fallbacks() == {}
    text = opweave_compile.report().to_json()
    assert "acme_scaled_residual" in text
    assert "scale_residuals" in text


def test_the_pass_leaves_others_alone() -> None:
    def shared(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scaled = ir.ops.rms_norm(x, weight, 1e-6) * 0.25
        return residual + scaled, scaled

    x, residual = torch.randn(2, 6, 32).to("acme")
    weight = torch.randn(32).to("acme")
    compiled = torch.compile(shared, backend="opweave")
    for found, wanted in zip(
        compiled(x, residual, weight), shared(x, residual, weight), strict=True
    ):
        assert torch.allclose(found.cpu(), wanted.cpu(), atol=1e-6)
    assert "acme_scaled_residual" not in opweave_compile.report().to_json()


def test_inductor_generates_code_for_the_device() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.softmax(x * 2, -1).amax(0)

    x = torch.randn(6, 32)
    acme_device.reset_fallbacks()
    found = torch.compile(f)(x.to("acme"))
    assert acme_device.fallbacks() == {}
    assert found.device.type == "acme"
    assert torch.allclose(found.cpu(), f(x), atol=1e-6)

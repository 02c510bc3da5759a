"""The option eager_rounding: compiled results have the bits of eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave_engine.load.loader import as_language_model, load_model
from support import ROOT

MODEL = ROOT / "examples/models/tiny-pydoc"
pytestmark = pytest.mark.timeout(600)


def chain(x: Tensor, gate: Tensor) -> Tensor:
    """Return bfloat16 values that eager mode rounds three times."""
    y = ir.ops.silu_and_mul(x) * gate + gate
    return ir.ops.rms_norm(y * 1.7 + gate, None, 1e-6)


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="opweave", fullgraph=True, options=options)


def test_fused_intermediates_are_rounded() -> None:
    x, gate = (torch.randn(64, n, dtype=torch.bfloat16) for n in (256, 128))
    expected = chain(x, gate)
    assert not torch.equal(compiled(chain)(x, gate), expected), "nothing to emulate"
    torch.compiler.reset()
    assert torch.equal(compiled(chain, eager_rounding=True)(x, gate), expected)


def test_the_checkpoint_of_the_readme_in_bfloat16() -> None:
    model = as_language_model(load_model(MODEL, dtype="bfloat16"))
    forward = torch.compile(
        model, backend="opweave", dynamic=True, fullgraph=True, options={"eager_rounding": True}
    )
    with torch.inference_mode():
        # For up to 16 tokens, eager mode multiplies with another kernel than dynamic graphs on CPUs
        # with bf16 instructions but without AMX; see opweave.kernels.opweave_c.linear.
        for tokens in (33, 70):
            ids, positions = torch.randint(0, model.vocab_size, (tokens,)), torch.arange(tokens)
            assert torch.equal(forward(ids, positions), model(ids, positions))

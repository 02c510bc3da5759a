"""``opweave.explain`` and ``print(ir.record())`` show the table of ``opweave explain``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import opweave
from opweave import ir


class Block(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for _ in range(2):
            x = ir.ops.rms_norm(x, None, 1e-6)
        return ir.ops.silu_and_mul(x * scale)


def test_a_module_of_ones_own() -> None:
    x = torch.randn(4, 8)
    with torch.no_grad(), ir.priority(rms_norm=["native"]):
        found = opweave.explain(Block(), x, scale=2.0)
    header, first, *others = str(found).splitlines()
    assert header.split("  ")[0] == "op"
    assert [cell.strip() for cell in header.split("  ") if cell] == [
        "op",
        "ran",
        "calls",
        "because of",
        "the others",
    ]
    assert [cell.strip() for cell in first.split("  ") if cell] == [
        "rms_norm",
        "native",
        "2",
        "scope ir.priority(rms_norm=...)",
        "opweave_c: native comes first",
    ]
    assert any(line.startswith("silu_and_mul") for line in others)
    assert found.selected_impls["rms_norm"] == {"native": 2}


def test_the_rows_are_those_of_the_command() -> None:
    from opweave.cli.explain import selection_table
    from opweave.cli.output import out

    with torch.no_grad():
        found = opweave.explain(Block(), torch.randn(4, 8))
    with out.capture() as captured:
        out.print(selection_table(found), width=300)
    printed = [line.split() for line in captured.get().splitlines()]
    assert [line.split() for line in str(found).splitlines()] == printed


def test_nothing_ran() -> None:
    assert str(opweave.explain(lambda: None)) == "op  ran  calls  because of  the others"

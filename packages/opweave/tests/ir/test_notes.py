"""An error that leaves an implementation says whose implementation that is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.errors import PredicateFailedError, described, notes
from opweave.registration import Owner, note_way_out, owned_by

ACME = Owner("acme", "acme-pkg", "1.0")
NOTE = rf"in double:acme \({__file__}:\d+, of the plugin acme \(acme-pkg 1\.0\)\)\. To go on "
X = torch.ones(2, 3)


def double(x: Tensor) -> Tensor:
    if x.numel() > 6:
        raise LookupError("too long")
    return x * 2


def broken(x: Tensor) -> Tensor:
    raise OSError("driver gone")


@pytest.fixture
def op(registry: ir.Registry, monkeypatch: pytest.MonkeyPatch) -> ir.IrOp:
    monkeypatch.setattr("opweave.registration._ways_out", {})
    note_way_out(ACME, "OPWEAVE_PLUGINS=-acme")
    return ir.register_op(allow_inplace=True)(double)


WAYS = ["call", "again", "scope", "call site", "torch op", "donating", "record", "gradient"]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_the_note(op: ir.IrOp, way: str, inplace: bool) -> None:
    fails = [way != "again"]

    def kernel(x: Tensor) -> Tensor:
        return broken(x) if fails[0] else x.mul_(2) if inplace else x * 2

    with owned_by(ACME):
        op.register_impl("acme", inplace=inplace, traits=["differentiable"])(kernel)
    if way not in ("scope", "call site"):
        op.set_default(["acme"])
    call: Any = {
        "call site": op.using("acme"),
        "torch op": op.torch_op,
        "donating": op.maybe_inplace,
        "gradient": lambda x: op(x.requires_grad_()),
    }.get(way, op)
    if way == "again":
        call(X.clone())
        fails[0] = True
    scopes: Any = {"record": ir.record, "scope": lambda: ir.priority(double=["acme"])}
    with scopes.get(way, lambda: ir.priority({}))(), pytest.raises(OSError, match="gone") as raised:
        call(X.clone())
    assert len(raised.value.__notes__) == 1
    assert notes(raised.value).endswith("without the plugin: OPWEAVE_PLUGINS=-acme]")
    raised.match(NOTE)


def test_the_note_of_a_program_has_no_way_out(op: ir.IrOp) -> None:
    op.register_impl("mine")(broken)
    with pytest.raises(OSError, match="gone") as raised:
        op.using("mine")(X)
    site = op.impls["mine"].site
    assert described(raised.value) == f"OSError: driver gone [in double:mine ({site})]"


def test_the_ops_own_refusals_have_none(op: ir.IrOp) -> None:
    with pytest.raises(LookupError) as raised:
        op(torch.ones(7))
    assert not notes(raised.value)


def test_implementations_inside_of_each_other(op: ir.IrOp) -> None:
    op.register_impl("inner")(broken)
    op.register_impl("outer")(lambda x: op.using("inner")(x) + 1)
    with pytest.raises(OSError, match="gone") as raised:
        op.using("outer")(X)
    assert [note[:15] for note in raised.value.__notes__] == ["in double:inner", "in double:outer"]


def test_in_a_compiled_graph(op: ir.IrOp) -> None:
    with owned_by(ACME):
        op.register_impl("acme")(broken)
    op.set_default(["acme"])
    compiled = torch.compile(lambda x: op(x + 1), backend="opweave", options={"codegen": False})
    with torch.no_grad(), pytest.raises(OSError, match="gone") as raised:
        compiled(X)
    raised.match(NOTE)


def test_a_predicate_that_raises(op: ir.IrOp) -> None:
    with owned_by(ACME):
        op.register_impl("acme", supports_args=broken)(double)
    told = r"'acme' \(.*, of the plugin acme \(acme-pkg 1.0\)\) raised OSError: driver gone.*"
    with pytest.raises(PredicateFailedError, match=told + "without the plugin: .*=-acme"):
        op.using("acme")(X)


def test_calls_pay_nothing_for_it(op: ir.IrOp) -> None:
    op.register_impl("acme")(lambda x: x * 2)
    site = op.using("acme")
    site(X)
    function = type(site).__call__
    assert "try: return _run(x)" in site.paths[0].source
    kernel = op.impls["acme"].impl_fn
    assert kernel in [cell.cell_contents for cell in function.__closure__]

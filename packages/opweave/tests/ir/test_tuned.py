"""Priorities of a tuning file, which depend on the number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.errors import ProviderRejectedError
from opweave.ir.priority import PriorityEntry, SizeRange


def tuned(provider: str) -> tuple[PriorityEntry, ...]:
    return (PriorityEntry(provider, False, f"tuned: {provider} is fast"),)


RANGES = [SizeRange(2, tuned("small")), SizeRange(8, ()), SizeRange(None, tuned("large"))]
EXPECTED = {0: "small", 1: "small", 2: "small", 3: "usual", 8: "usual", 9: "large", 99: "large"}


def kernel(provider: str) -> Callable[..., Tensor]:
    def run(x: Tensor, y: Tensor | None = None) -> Tensor:
        ran.append(provider)
        return x + x

    return run


ran: list[str] = []


@pytest.fixture
def op() -> Iterator[ir.IrOp]:
    with ir.isolated_registry() as registry:

        @ir.register_op
        def scaled(x: Tensor, y: Tensor | None = None) -> Tensor:
            return x * 2

        for provider in ("usual", "small", "large"):
            scaled.register_impl(provider)(kernel(provider))

        lists = {"scaled": "usual"}
        registry.settings.set_priorities(ir.Source.PLATFORM, lists, "platform default")
        yield scaled


@pytest.mark.parametrize("tokens", EXPECTED)
def test_every_way_to_call_chooses_by_tokens(op: ir.IrOp, tokens: int) -> None:
    op.registry.settings.set_tuned({"scaled": RANGES})
    x = torch.randn(tokens, 4)
    assert op.dispatch(x).provider == EXPECTED[tokens]
    assert ir.explain(op, x).chosen == EXPECTED[tokens]
    for call in (op, op.torch_op):
        call(x)  # generates the code
        ran.clear()
        assert torch.equal(call(x), x * 2)
        assert ran == [EXPECTED[tokens]]


def test_stronger_sources_win(op: ir.IrOp) -> None:
    op.registry.settings.set_tuned({"scaled": RANGES})
    x = torch.randn(1, 4)
    op.set_default(["large"])
    assert op.dispatch(x).provider == "large"
    with ir.priority(scaled="native"):
        assert op.dispatch(x).provider == "native"
        assert ir.explain(op, x).chosen == "native"
    op.set_default([])
    assert op.dispatch(x).provider == "small"


def test_without_a_tuning_file_the_code_is_the_same(op: ir.IrOp) -> None:
    op(torch.randn(1, 4))
    before = op.dispatch_source
    op.registry.settings.set_tuned({"scaled": RANGES})
    op(torch.randn(1, 4))
    assert "_tokens <= 2" in op.dispatch_source
    for empty in ({}, {"other": RANGES}):
        op.registry.settings.set_tuned(empty)
        op(torch.randn(1, 4))
        assert op.dispatch_source == before


def test_one_range_for_all_sizes_needs_no_comparison(op: ir.IrOp) -> None:
    op.registry.settings.set_tuned({"scaled": [SizeRange(None, tuned("large"))]})
    for x in (torch.randn(1, 4), torch.tensor(1.0)):
        op(x)
        assert op.dispatch(x).provider == "large"
    assert "_tokens" not in op.dispatch_source


def test_a_scalar_has_no_tokens(op: ir.IrOp) -> None:
    op.registry.settings.set_tuned({"scaled": RANGES})
    op(torch.randn(1, 4))
    ran.clear()
    assert torch.equal(op(torch.tensor(3.0)), torch.tensor(6.0))
    assert ran == [op.dispatch(torch.tensor(3.0)).provider] == ["small"]


def test_the_choice_without_a_first_tensor() -> None:
    with ir.isolated_registry() as registry:

        @ir.register_op
        def picked(x: Tensor | None, y: Tensor) -> Tensor:
            return y * 2

        @picked.register_impl("other")
        def _(x: Tensor | None, y: Tensor) -> Tensor:
            return y + y

        ranges = [SizeRange(2, tuned("other")), SizeRange(None, tuned("other"))]
        registry.settings.set_tuned({"picked": ranges})
        for x, expected in ((None, "native"), (torch.ones(1), "other"), (torch.ones(9), "other")):
            assert picked.dispatch(x, torch.ones(3)).provider == expected
            assert torch.equal(picked(x, torch.ones(3)), torch.full((3,), 2.0))


def test_unknown_providers_are_skipped(op: ir.IrOp) -> None:
    ranges = [SizeRange(2, tuned("of_a_missing_plugin")), SizeRange(None, tuned("large"))]
    op.registry.settings.set_tuned({"scaled": ranges})
    assert op.dispatch(torch.randn(1, 4)).provider == "usual"
    assert op.dispatch(torch.randn(3, 4)).provider == "large"


def test_a_rejected_choice_falls_back(op: ir.IrOp) -> None:
    @op.register_impl("choosy", supports_args=lambda x: x.shape[1] == 4)
    def _(x: Tensor, y: Tensor | None = None) -> Tensor:
        return x * 2

    op.registry.settings.set_tuned({"scaled": [SizeRange(None, tuned("choosy"))]})
    assert op.dispatch(torch.randn(1, 4)).provider == "choosy"
    assert op.dispatch(torch.randn(1, 5)).provider == "usual"
    with ir.priority(scaled="choosy!"), pytest.raises(ProviderRejectedError):
        op.dispatch(torch.randn(1, 5))


def test_required_traits_filter_the_choice(op: ir.IrOp) -> None:
    op.registry.settings.set_tuned({"scaled": RANGES})
    with ir.require("batch_invariant"), pytest.raises(ir.errors.NoImplementationError):
        op.dispatch(torch.randn(1, 4))


def test_an_op_of_tensor_lists_is_not_tuned() -> None:
    with ir.isolated_registry() as registry:

        @ir.register_op
        def total(parts: list[Tensor]) -> Tensor:
            return torch.stack(parts).sum(0)

        ranges = [SizeRange(2, tuned("native")), SizeRange(None, ())]
        registry.settings.set_tuned({"total": ranges})
        assert total([torch.ones(2)]).tolist() == [1, 1]

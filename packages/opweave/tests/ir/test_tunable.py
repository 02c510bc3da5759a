"""Tunable parameters: every combination of values is an implementation of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opweave import ir, transaction
from opweave.conformance import subjects
from opweave.ir.errors import (
    InvalidOpError,
    SchemaMismatchError,
    SettingError,
    UnknownProviderError,
)
from opweave.ir.priority import SizeRange, parse
from support.hypothesis_profiles import examples

BLOCKS, SPLITS = (32, 64, 128), (1, 2)
X = torch.zeros(3, 2)


def kernel(x: Tensor, *, block: int = 64, splits: int = 1) -> Tensor:
    """Return values that tell which parameters it got."""
    return torch.full_like(x, 10 * block + splits)


@pytest.fixture
def op() -> Iterator[ir.IrOp]:
    with ir.isolated_registry():
        yield declared()


def declared() -> ir.IrOp:
    @ir.register_op
    def filled(x: Tensor) -> Tensor:
        return torch.full_like(x, -1)

    filled.register_impl("mine", tunable={"block": BLOCKS, "splits": SPLITS})(kernel)
    return filled


def names() -> dict[str, int]:
    """The names of all combinations, and what the kernel returns for each."""
    found = {}
    for block, splits in itertools.product(BLOCKS, SPLITS):
        changed = [f"block={block}"] * (block != 64) + [f"splits={splits}"] * (splits != 1)
        found["mine" + (f"[{','.join(changed)}]" if changed else "")] = 10 * block + splits
    return found


def test_every_combination_has_a_name(op: ir.IrOp) -> None:
    assert list(op.impls) == ["native", "mine", *(name for name in names() if name != "mine")]
    assert op.supported_providers() == list(op.impls)


@pytest.mark.parametrize("name", names())
def test_each_name_runs_its_values(op: ir.IrOp, name: str) -> None:
    expected = torch.full_like(X, names()[name])
    for call in (op.using(name), op.using(f"{name}!", "native")):
        assert torch.equal(call(X), expected)
    with ir.priority(filled=f"{name}, native"):
        for call in (op, op.torch_op):
            assert torch.equal(call(X), expected)
        assert ir.explain(op, X).chosen == name
    op.set_default([name])
    assert op.get_priority() == [name, "native"]


def test_names_in_text() -> None:
    text = "mine[block=32,splits=2]!, other,mine"
    assert [str(entry) for entry in parse(text, "a test")] == [
        "mine[block=32,splits=2]!", "other", "mine",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (("mine[block=33]", "mine[size=32]", "other[block=32]"), UnknownProviderError),
        (("mine[", "mine[]", "mine[block]", "mine[block=]", "mine]"), SettingError),
    ],
)
def test_names_of_no_value(op: ir.IrOp, names: Sequence[str], error: type[Exception]) -> None:
    for name in names:
        with pytest.raises(error, match=r"unknown provider|is not the name of a provider"):
            op.using(name)


@pytest.mark.parametrize(
    ("tunable", "message"),
    [
        ({"size": (1,)}, "tunable 'size' must be a keyword-only parameter"),
        ({"x": (1,)}, "tunable 'x' must be a keyword-only parameter"),
        ({"block": (32, 128), "splits": SPLITS}, "contain its default 64"),
        ({"block": (64, 64), "splits": SPLITS}, "must be distinct"),
        ({"block": (64, "A-b"), "splits": SPLITS}, "'A-b' of 'block' must be a number"),
        ({"block": (64, -1), "splits": SPLITS}, "-1 of 'block' must be a number"),
        ({"block": range(100), "splits": SPLITS}, "200 combinations of block, splits are too many"),
    ],
)
def test_wrong_declarations(
    op: ir.IrOp, tunable: Mapping[str, Sequence[Any]], message: str
) -> None:
    with pytest.raises(InvalidOpError, match=message):
        op.register_impl("other", tunable=tunable)(kernel)
    assert "other" not in op.impls


def test_other_parameters_must_be_those_of_the_op(op: ir.IrOp) -> None:
    with pytest.raises(SchemaMismatchError, match="splits"):
        op.register_impl("other", tunable={"block": BLOCKS})(kernel)


def test_replacing_and_undoing_concern_all_values(op: ir.IrOp) -> None:
    before = dict(op.impls)

    def replace() -> None:
        with transaction.begin():
            op.register_impl("mine", override=True)(lambda x: x + 1)
            assert list(op.impls) == ["native", "mine"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace()
    assert dict(op.impls) == before


def test_each_value_is_verified(op: ir.IrOp) -> None:
    assert [s.provider for s in subjects(["filled"], ["mine"])] == [*op.impls][1:]
    assert [s.provider for s in subjects(["filled"], ["mine[block=32]"])] == ["mine[block=32]"]


@given(
    limits=st.lists(st.integers(0, 6), max_size=2, unique=True).map(sorted),
    chosen=st.lists(st.sampled_from([*names(), ""]), min_size=3, max_size=3),
)
@examples(10)
def test_eager_and_compiled_choose_alike(limits: list[int], chosen: list[str]) -> None:
    values = {**names(), "": -1}
    with ir.isolated_registry():
        op = declared()
        ranges = [
            SizeRange(limit, parse(name, "tuned") if name else ())
            for limit, name in zip([*limits, None], chosen, strict=False)
        ]
        op.registry.settings.set_tuned({op.name: ranges})
        torch._dynamo.reset()
        compiled = torch.compile(op, backend="opweave", dynamic=False, options={"codegen": False})
        for tokens in {0, 7, *limits, *(limit + 1 for limit in limits)}:
            x = torch.zeros(tokens, 2)
            inside = [name for limit, name in zip(limits, chosen, strict=False) if tokens <= limit]
            expected = torch.full_like(x, values[inside[0] if inside else chosen[len(limits)]])
            with torch.no_grad():
                for call in (op, op, op.torch_op, compiled):  # the first generates the code
                    assert torch.equal(call(x), expected)

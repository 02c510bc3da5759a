"""Arguments and results of ops: lists of tensors, and checks of results."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.errors import InvalidResultError, PredicateFailedError, TensorArgumentError

X = torch.ones(2, 3)


@pytest.fixture
def total(registry: ir.Registry) -> ir.IrOp:
    @ir.register_op
    def total(x: Tensor, ys: list[Tensor], zs: list[Tensor | None]) -> Tensor:
        return x + sum(ys) + sum(z for z in zs if z is not None)

    return total


@pytest.mark.parametrize("in_scope", [False, True])
@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (((t for t in (X, X)), []), "ys must be a list or tuple of Tensors, found generator"),
        ((X, []), "ys must be a list or tuple of Tensors, found Tensor"),
        ((X[0], []), "ys must be a list or tuple of Tensors, found Tensor"),
        (([1.0, X], []), r"ys must be a list or tuple of Tensors, found float at \[0\]"),
        (([X, None], []), r"ys must be a list or tuple of Tensors, found NoneType at \[1\]"),
        ((None, []), "ys must be a list or tuple of Tensors, found NoneType"),
        (([], [X, "a"]), r"zs must be a list or tuple of Tensors and None, found str at \[1\]"),
    ],
)
def test_lists_of_something_else_are_refused(
    total: ir.IrOp, lists: Any, message: str, in_scope: bool
) -> None:
    total(X, [X], [X])
    scope = ir.priority({"total": ["native"]} if in_scope else {})
    with scope, pytest.raises(TensorArgumentError, match=message):
        total(X, *lists)


def test_lists_that_are_accepted(total: ir.IrOp) -> None:
    assert torch.equal(total(X, [], []), X)
    assert torch.equal(total(X, (X, X), ()), X * 3)
    assert torch.equal(total(X, [X], [None, X]), X * 3)


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x * 2


def one(x: Tensor) -> Tensor:
    return x * 2


WRONG = [
    (pair, lambda x: x * 2, "a tuple of 2 Tensors, found Tensor"),
    (pair, lambda x: None, "a tuple of 2 Tensors, found NoneType"),
    (pair, lambda x: (x, x, x), "a tuple of 2 Tensors, found tuple of 3"),
    (one, lambda x: None, "one Tensor, found NoneType"),
    (one, lambda x: (x, x), "one Tensor, found tuple of 2"),
    (one, lambda x: 2.0, "one Tensor, found float"),
    (pair, lambda x: (x, 2.0), "a tuple of 2 Tensors, found tuple of 2 with float in it"),
    (pair, lambda x: 2.0, "a tuple of 2 Tensors, found float"),
]


@pytest.mark.parametrize(("native", "kernel", "found"), WRONG)
@pytest.mark.parametrize("way", ["call", "scope", "call site", "torch op", "record", "gradient"])
def test_results_of_another_number_are_refused(
    registry: ir.Registry, native: Any, kernel: Any, found: str, way: str
) -> None:
    op = ir.register_op(native)
    op.register_impl("kernel", traits=["differentiable"])(kernel)
    if way not in ("scope", "call site"):
        op.set_default(["kernel"])
    else:
        op(X)
    x = X.clone().requires_grad_(way == "gradient")
    call = {"call site": op.using("kernel"), "torch op": op.torch_op}.get(way, op)
    scope: Any = ir.record() if way == "record" else ir.priority({op.name: ["kernel"]})
    wrong = pytest.raises(InvalidResultError, match=rf"{op.name}: .*'kernel' .* return {found}")
    with scope if way in ("scope", "record") else ir.priority({}), wrong:
        call(x)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., ::2], x[..., 1::2].to(torch.int8)


OTHER = {  # native, kernel, what its result is, and what it should be
    "dtype": (one, lambda x: x.double(), r"float64\[2, 3\] cpu", r"float32\[2, 3\] cpu"),
    "sizes": (one, lambda x: x[:1], r"float32\[1, 3\] cpu", r"float32\[2, 3\] cpu"),
    "dimensions": (one, lambda x: x[None], r"float32\[1, 2, 3\] cpu", r"float32\[2, 3\] cpu"),
    "device": (one, lambda x: x.to("meta"), r"float32\[2, 3\] meta", r"float32\[2, 3\] cpu"),
    "second": (
        halves,
        lambda x: (x[..., ::2], x[..., 1::2]),
        r"float32\[2, 1\] cpu as output 1",
        r"int8\[2, 1\] cpu",
    ),
}


@pytest.mark.parametrize("wrong", OTHER)
@pytest.mark.parametrize("way", ["call", "scope", "torch op", "record", "donating", "keyword"])
def test_results_of_another_kind_are_refused(registry: ir.Registry, wrong: str, way: str) -> None:
    native, kernel, found, wanted = OTHER[wrong]
    activations = ["x"] if native is one else []
    op = ir.register_op(allow_inplace=native is one, activations=activations)(native)
    op.register_impl("kernel", inplace=way == "donating" and native is one)(kernel)
    op.set_default(["kernel"])
    call: Any = {"torch op": op.torch_op, "keyword": lambda x: op(x=x)}.get(way, op)
    if way == "donating" and native is one:
        call = op.maybe_inplace
    scope: Any = {"record": ir.record, "scope": lambda: ir.priority({op.name: ["kernel"]})}
    refused = pytest.raises(
        InvalidResultError,
        match=rf"{op.name}: .*'kernel' \({__file__}:\d+\) returned {found}, but .* {wanted}",
    )
    for _ in range(2):  # it stays wrong
        with scope.get(way, ir.record)(), refused:
            call(X.clone())


@pytest.mark.parametrize("way", ["call", "scope", "torch op"])
def test_results_in_the_memory_of_an_argument_are_refused(registry: ir.Registry, way: str) -> None:
    op = ir.register_op(allow_inplace=True, activations=["x"])(one)
    op.register_impl("same")(lambda x: x)
    op.register_impl("view")(lambda x: x.view(-1).view(x.shape))
    op.register_impl("in_place", inplace=True)(lambda x: x.mul_(2))
    call: Any = op.torch_op if way == "torch op" else op
    scope: Any = ir.record if way == "scope" else nullcontext
    for provider in ("same", "view"):
        with (
            ir.priority({op.name: [provider]}),
            scope(),
            pytest.raises(InvalidResultError, match="its output in the memory of an argument"),
        ):
            call(X.clone())
    with ir.priority({op.name: ["in_place"]}):
        assert torch.equal(op.maybe_inplace(X.clone()), X * 2)


def test_one_row_does_not_tell_the_shape(registry: ir.Registry) -> None:
    op = ir.register_op(one)
    op.register_impl("kernel")(lambda x: x[:1] * 2)
    op.set_default(["kernel"])
    for _ in range(3):
        op(X[:1])
    with pytest.raises(InvalidResultError, match="returned"):
        op(X)


def test_metadata_is_looked_at_once(registry: ir.Registry) -> None:
    op = ir.register_op(one)
    foretold = []
    op.register_fake(lambda x: foretold.append(x) or torch.empty_like(x))  # type: ignore[arg-type]
    op.register_impl("kernel")(lambda x: x * 2)
    op.set_default(["kernel"])
    for _ in range(3):
        op(X)
    for call in (op.using("kernel"), op.torch_op):
        call(X)
    with ir.record(), ir.priority({op.name: ["kernel"]}):
        op(X)
    assert len(foretold) == 1


def test_a_call_without_tensors_is_looked_at(registry: ir.Registry) -> None:
    @ir.register_op
    def zeros(ys: list[Tensor]) -> Tensor:
        return torch.zeros(2)

    zeros.register_impl("kernel")(lambda ys: torch.zeros(2))
    zeros.register_impl("wrong")(lambda ys: torch.zeros(3))
    assert torch.equal(zeros.using("kernel")([]), torch.zeros(2))
    with pytest.raises(InvalidResultError, match=r"returned float32\[3\] cpu"):
        zeros.using("wrong")([])


def test_what_only_the_data_tells_is_taken(registry: ir.Registry) -> None:
    @ir.register_op
    def positive(x: Tensor) -> Tensor:
        return x[x > 0]

    positive.register_impl("kernel")(lambda x: x.flatten()[x.flatten() > 0])
    assert torch.equal(positive.using("kernel")(X), torch.ones(6))


def test_a_composite_is_foretold_without_kernels(registry: ir.Registry) -> None:
    @ir.register_op
    def inner(x: Tensor) -> Tensor:
        return x * 2

    @ir.register_op(composite=True)
    def outer(x: Tensor) -> Tensor:
        return inner(inner(x)) + 1

    @inner.register_impl("kernel")
    def _(x: Tensor) -> Tensor:
        assert x.device.type == "cpu"
        return x * 2

    inner.set_default(["kernel"])
    outer.register_impl("kernel")(lambda x: x * 4)
    outer.register_impl("wrong")(lambda x: (x * 4).double())
    with pytest.raises(InvalidResultError):
        outer.using("wrong")(X)
    assert torch.equal(outer.using("kernel")(X), X * 4)


def test_autocast_decides_the_dtype(registry: ir.Registry) -> None:
    @ir.register_op
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    product.register_impl("kernel")(lambda x, y: x.mm(y))
    with torch.autocast("cpu", torch.bfloat16):
        assert product.using("kernel")(X, X.T).dtype == torch.bfloat16


def test_a_list_of_results_will_do(registry: ir.Registry) -> None:
    op = ir.register_op(pair)
    op.register_impl("kernel")(lambda x: [x * 1, x * 2])
    assert len(op.using("kernel")(X)) == 2


@pytest.mark.parametrize("answer", ["no", 1, None, torch.tensor(True)])
def test_a_predicate_answers_true_or_false(registry: ir.Registry, answer: Any) -> None:
    op = ir.register_op(one)
    answers = [True]
    op.register_impl("kernel", supports_args=lambda x: answers[0])(one)
    op.set_default(["kernel"])
    assert op.dispatch(X).provider == "kernel"
    op(X)
    answers[0] = answer
    for call in (op, op.dispatch, op.torch_op):
        with pytest.raises(PredicateFailedError, match=r"it returned .* must return True or False"):
            call(X)
    answers[0] = False
    assert op.dispatch(X).provider == "native"
    op(X)

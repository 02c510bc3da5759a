"""A compiled function never runs a selection that is out of date."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import opweave.compile
from opweave import ir
from opweave.compile import report
from opweave.compile.backend import CompiledGraph
from opweave.ir.priority import PriorityEntry, SizeRange
from opweave.ir.testing import restored

from .conftest import compiled

X = torch.ones(3, 4)


@pytest.fixture
def double() -> Any:
    """An op whose implementations can be told apart by their results."""
    with ir.isolated_registry():

        @ir.register_op
        def double(x: Tensor) -> Tensor:
            return x * 2

        @double.register_impl("three", traits={"batch_invariant"})
        def _(x: Tensor) -> Tensor:
            return x * 3

        @double.register_impl("five")
        def _(x: Tensor) -> Tensor:
            return x * 5

        yield double


def calling(op: ir.IrOp) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        return op(x)

    return function


def factor(function: Callable[..., Any], x: Tensor = X) -> float:
    (found,) = set(function(x).flatten().tolist())
    return float(found)


def test_scopes_defaults_and_traits(double: ir.IrOp) -> None:
    run = compiled(calling(double))
    assert factor(run) == 2
    with ir.priority(double="three"):
        assert factor(run) == 3
        with ir.priority(double="five"):
            assert factor(run) == 5
        assert factor(run) == 3
    assert factor(run) == 2
    with ir.require("batch_invariant"):
        assert factor(run) == 3
    double.set_default(["five"])
    assert factor(run) == 5
    double.set_default([])
    assert factor(run) == 2


def test_an_implementation_that_comes_later(double: ir.IrOp) -> None:
    double.set_default(["three"])
    run = compiled(calling(double))
    assert factor(run) == 3

    @double.register_impl("three", override=True)
    def _(x: Tensor) -> Tensor:
        return x * 7

    assert factor(run) == 7


def test_each_selection_is_compiled_once(double: ir.IrOp) -> None:
    run = compiled(calling(double))
    for _ in range(3):
        factor(run)
        with ir.priority(double="three"):
            factor(run)
    chosen = [[node.chosen for node in report.nodes] for report in opweave.compile.reports()]
    assert chosen == [["native"], ["three"]]


def test_nothing_is_filed_where_dynamo_compiles_nothing(double: ir.IrOp) -> None:
    run = compiled(calling(double))
    assert factor(run) == 2
    told = [
        lambda: torch.compiler.set_stance("eager_on_recompile"),
        lambda: torch._dynamo.config.patch(disable=True),
    ]
    for each in told:
        with ir.priority(double="three"), each():
            assert factor(run) == 3
    assert len(opweave.compile.reports()) == 1
    with ir.priority(double="three"):
        assert factor(run) == 3
    assert len(opweave.compile.reports()) == 2


def test_the_call_site_is_in_the_graph(double: ir.IrOp) -> None:
    run = compiled(lambda x: double.using("five")(x) + double(x))
    assert factor(run) == 7


def test_options(double: ir.IrOp) -> None:
    run = compiled(calling(double), priorities={"double": ["three", "five"]})
    assert factor(run) == 3
    with ir.priority(double="five"):  # the option is stronger
        assert factor(run) == 3
    torch.compiler.reset()
    run = compiled(calling(double), required_traits=("batch_invariant",))
    assert factor(run) == 3


def test_compile_ranges(double: ir.IrOp) -> None:
    ranges = {"1-8": {"double": "three"}, "100-200": {"double": "five"}}
    run = compiled(calling(double), dynamic=True, compile_ranges=ranges)
    factors = [factor(run, torch.ones(n, 4)) for n in (4, 50, 150, 8, 9, 201, 2)]
    assert factors == [3, 2, 5, 3, 2, 2, 3]


def test_threads_with_different_scopes(double: ir.IrOp) -> None:
    run = compiled(calling(double))
    factor(run)

    def work(provider: str) -> list[float]:
        with ir.priority(double=provider), torch.no_grad():
            return [factor(run) for _ in range(20)]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, ["native", "three", "five"]))
    assert found == [[2.0] * 20, [3.0] * 20, [5.0] * 20]


def test_threads_in_different_ranges(double: ir.IrOp, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = {"2-8": {"double": "three"}, "9-99": {"double": "five"}}
    run = compiled(calling(double), dynamic=True, compile_ranges=ranges)
    small, large = torch.ones(4, 1), torch.ones(20, 1)
    assert (factor(run, small), factor(run, large), factor(run, small)) == (3, 5, 3)
    holds, others = CompiledGraph._holds, [large]

    def interrupted(graph: CompiledGraph, *arguments: Any) -> bool:
        """Another thread's call comes between a call's question and what follows from it."""
        answer = holds(graph, *arguments)
        if others:
            run(others.pop())
        return answer

    monkeypatch.setattr(CompiledGraph, "_holds", interrupted)
    assert factor(run, small) == 3
    assert not others


def test_a_call_that_compiles_runs_the_graph_once() -> None:
    with ir.isolated_registry():

        @ir.register_op
        def noisy(x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

        @noisy.register_impl("other")
        def _(x: Tensor) -> Tensor:
            return x + torch.rand_like(x) + 1

        run = compiled(calling(noisy))
        run(X)
        found = []
        for _ in range(2):
            torch.manual_seed(0)
            with ir.priority(noisy="other"):
                found.append((run(X), torch.rand(1)))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_zeros_of_both_signs() -> None:
    with ir.isolated_registry():

        @ir.register_op
        def over(x: Tensor, zero: float) -> Tensor:
            return x / torch.full_like(x, zero)

        def function(x: Tensor) -> Any:
            return over(x, 0.0), over(x, -0.0)

        inf = float("inf")
        assert [float(y[0, 0]) for y in compiled(function)(X)] == [inf, -inf]


def test_threads_compiling_at_the_same_time(double: ir.IrOp) -> None:
    def work(number: int) -> float:
        # Code of its own, and of a file: all functions without one are the same to torch 2.11.
        code = compile(f"lambda x: double(x) + {number}", __file__, "eval")
        function = eval(code, {"double": double})
        provider = ["native", "three", "five"][number % 3]
        with ir.priority(double=provider), torch.no_grad():
            return factor(compiled(function)) - number

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(12))) == [2.0, 3.0, 5.0] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fusoin": False}, "unknown option 'fusoin'.*fusion"),
        ({"fuson": False}, r"Did you mean 'fusion'\? Known: codegen, [a-z_, ]+\. Inductor's"),
        ({"max_autotun": True}, "Did you mean 'max_autotune'"),
        ({"compile_ranges": {"1-4": 5}}, r"OptionError.*compile_ranges\['1-4'\]=5 does not map"),
        ({"required_traits": "batch_invariant"}, "OptionError.*is not a list of traits"),
        ({"required_traits": 5}, "OptionError.*required_traits=5 is not a list"),
        ({"fusion": "no"}, "option fusion='no' is neither True nor False"),
        ({"priorities": ["native"]}, "is not a mapping"),
        ({"priorities": {"dubble": "native"}}, "unknown op 'dubble'.*double"),
        ({"priorities": {"double": "threx"}}, "unknown provider 'threx'.*three"),
        ({"compile_ranges": {"8-1": {}}}, "compile range '8-1'"),
        ({"compile_ranges": {"1-8": {}, "8": {}}}, "two ranges contain 8"),
        ({"required_traits": ("fast",)}, "unknown trait 'fast'"),
    ],
)
def test_bad_options(double: ir.IrOp, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        factor(compiled(calling(double), **options))


def test_a_call_from_python_does_not_compile_again(double: ir.IrOp) -> None:
    run = compiled(calling(double))
    assert factor(run) == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        assert factor(double) == 2  # the first one: it generates what calls of the op run
        assert factor(run) == 2


def test_a_call_site_whose_provider_is_gone_is_not_prepared(double: ir.IrOp) -> None:
    with restored(double):
        double.register_impl("gone")(lambda x: x * 7)
        double.using("gone!")
    assert factor(compiled(calling(double))) == 2


# Compiled graphs choose by the number of tokens as eager calls do, if the size is known.


def tuned(provider: str) -> tuple[PriorityEntry, ...]:
    return (PriorityEntry(provider, False, "tuned"),)


@pytest.fixture
def op() -> Iterator[ir.IrOp]:
    op = ir.ops.silu_and_mul
    ranges = [
        SizeRange(2, tuned("batch_invariant")), SizeRange(8, ()), SizeRange(None, tuned("native"))
    ]  # fmt: skip
    op.registry.settings.set_tuned({op.name: ranges})
    torch._dynamo.reset()
    yield op
    op.registry.settings.set_tuned({})
    torch._dynamo.reset()


def provider(op: ir.IrOp, x: Tensor, *, dynamic: bool | None = None) -> str:
    """Compile a call of the op, check its result, and return the provider."""
    function = torch.compile(
        lambda x: op(x) + 1, backend="opweave", dynamic=dynamic, options={"codegen": False}
    )
    torch.testing.assert_close(function(x), op.native(x) + 1)
    [node] = report().nodes
    return node.chosen


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 40])
def test_static_shapes_choose_as_eager(op: ir.IrOp, tokens: int) -> None:
    x = torch.randn(tokens, 16)
    assert provider(op, x, dynamic=False) == op.dispatch(x).provider == ir.explain(op, x).chosen


@pytest.mark.parametrize(
    ("bounds", "chosen"),
    [
        ({}, "opweave_c"),  # 2 to any number
        ({"min": 9, "max": 64}, "native"),
        ({"min": 3, "max": 8}, "opweave_c"),
        ({"min": 8, "max": 64}, "opweave_c"),  # in two ranges
    ],
)
def test_dynamic_shapes_choose_where_the_whole_range_agrees(
    op: ir.IrOp, bounds: dict[str, int], chosen: str
) -> None:
    x = torch.randn(8 if bounds.get("max") == 8 else 20, 16)
    torch._dynamo.mark_dynamic(x, 0, **bounds)
    assert provider(op, x) == chosen


def test_another_tuning_file_compiles_again(op: ir.IrOp) -> None:
    function = compiled(op)
    x = torch.randn(1, 16)
    function(x)
    assert [node.chosen for node in report().nodes] == ["batch_invariant"]
    op.registry.settings.set_tuned({})
    torch.testing.assert_close(function(x), op.native(x))
    assert [node.chosen for node in report().nodes] == ["opweave_c"]

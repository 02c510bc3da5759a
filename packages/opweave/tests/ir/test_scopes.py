"""Scopes: limited to the thread or task, nested, and undone on exit, also after an error."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.errors import (
    ProviderUnavailableError,
    SettingError,
    UnknownOpError,
    UnknownProviderError,
    UnknownTraitError,
)
from support.fixtures import Case
from support.strategies import MARKS, PROVIDER_OF, PROVIDERS

if TYPE_CHECKING:
    from support.fixtures import FreshCases

NUM_THREADS = 16


def marked(mark: int) -> Callable[[Tensor], Tensor]:
    def kernel(x: Tensor) -> Tensor:
        return x + mark

    return kernel


@pytest.fixture
def op(registry: ir.Registry) -> ir.IrOp:
    found = ir.register_op(name="marked")(marked(MARKS["native"]))
    for provider in PROVIDERS[:4]:
        found.register_impl(provider)(marked(MARKS[provider]))
    return found


def ran(op: Callable[[Tensor], Tensor]) -> str:
    return PROVIDER_OF[int(op(torch.zeros(1)).item())]


def test_threads_do_not_see_each_others_scopes(op: ir.IrOp) -> None:
    barrier = threading.Barrier(NUM_THREADS)

    def work(i: int) -> set[str]:
        mine = PROVIDERS[i % 4]
        seen = set()
        barrier.wait()
        for _ in range(50):
            with ir.priority(marked=[mine]):
                seen |= {ran(op), ran(op.torch_op), op.get_priority()[0]}
                seen.add(op.dispatch(torch.zeros(1)).provider)
            assert ran(op) == "native"
        return seen

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for i, seen in enumerate(pool.map(work, range(NUM_THREADS))):
            assert seen == {PROVIDERS[i % 4]}


def test_a_new_thread_starts_outside(op: ir.IrOp) -> None:
    with ir.priority(marked=["alpha"]), ThreadPoolExecutor(1) as pool:
        assert pool.submit(ran, op).result() == "native"
        context = contextvars.copy_context()
        assert pool.submit(context.run, ran, op).result() == "alpha"


def test_tasks_do_not_see_each_others_scopes(op: ir.IrOp) -> None:
    async def work(i: int) -> set[str]:
        seen = set()
        with ir.priority(marked=[PROVIDERS[i % 4]]):
            for _ in range(10):
                await asyncio.sleep(0)
                seen.add(ran(op))
            with ir.priority(marked=[PROVIDERS[(i + 1) % 4]]):
                await asyncio.sleep(0)
                assert ran(op) == PROVIDERS[(i + 1) % 4]
        await asyncio.sleep(0)
        assert ran(op) == "native"
        return seen

    async def main() -> None:
        found = await asyncio.gather(*map(work, range(20)))
        assert found == [{PROVIDERS[i % 4]} for i in range(20)]
        with ir.priority(marked=["delta"]):
            assert ran(op) == "delta"
            inherited = asyncio.create_task(asyncio.to_thread(ran, op))
            assert await inherited == "delta"

    asyncio.run(main())


def test_registrations_while_other_threads_call(op: ir.IrOp) -> None:
    """Every call sees some consistent state, and nothing raises."""
    stop = threading.Event()

    def call(i: int) -> set[str]:
        seen = set()
        with ir.priority(marked=[PROVIDERS[i]]):
            while not stop.is_set():
                seen |= {ran(op), ran(op.using(PROVIDERS[i]))}
        return seen

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, i) for i in range(4)]
        try:
            for i in range(60):
                op.register_impl(f"late_{i}", supports_args=lambda x: False)(marked(0))
                op.set_default([f"late_{i}"])
        finally:
            stop.set()
        assert [c.result() for c in calls] == [{p} for p in PROVIDERS[:4]]


def test_call_sites_that_begin_while_settings_change(op: ir.IrOp) -> None:
    sites = [order for n in range(1, 5) for order in itertools.permutations(PROVIDERS[:4], n)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            begun = pool.submit(lambda: [ran(op.using(*order)) for order in sites])
            while not begun.done():
                op.set_default(["alpha"])
    finally:
        sys.setswitchinterval(interval)
    assert begun.result() == [order[0] for order in sites]


def test_the_inner_scope_beats_the_outer_one(op: ir.IrOp) -> None:
    with ir.priority(marked=["alpha", "beta"]):
        with ir.priority({"marked": "gamma, alpha"}):
            assert op.get_priority() == ["gamma", "alpha", "beta", "native"]
            assert ran(op) == "gamma"
            with ir.priority(marked=["native"]):
                assert ran(op) == "native"
            assert ran(op) == "gamma"
        assert ran(op) == "alpha"
    assert ran(op) == "native"


def test_a_scope_ends_with_an_exception(op: ir.IrOp) -> None:
    for scope in (
        lambda: ir.priority(marked="beta"),
        lambda: ir.require("batch_invariant"),
        ir.record,
        lambda: op.set_priority(["beta"]),
    ):
        with pytest.raises(ZeroDivisionError), ir.priority(marked=["alpha"]), scope():
            raise ZeroDivisionError
        assert ran(op) == "native"
        assert op.get_priority() == ["native"]


def test_a_refused_scope_changes_nothing(op: ir.IrOp) -> None:
    with ir.priority(marked=["alpha"]):
        for error, lists in [
            (UnknownOpError, {"marcked": ["alpha"]}),
            (UnknownProviderError, {"marked": ["alfa"]}),
            (SettingError, {"marked": []}),
            (SettingError, {"marked": ["no such name"]}),
            (SettingError, {"marked": "alpha,,beta"}),
        ]:
            with pytest.raises(error), ir.priority(lists):
                pytest.fail("the scope was entered")
        with pytest.raises(UnknownTraitError), ir.require("batch_invariance"):
            pytest.fail("the scope was entered")
        assert ran(op) == "alpha"


def test_a_registration_inside_a_scope_counts_at_once(op: ir.IrOp) -> None:
    with ir.priority(marked=["alpha"]):
        assert ran(op) == "alpha"
        op.register_impl("epsilon")(marked(MARKS["epsilon"]))
        assert ran(op) == "alpha"
        with ir.priority(marked=["epsilon"]):
            assert ran(op) == "epsilon"
        op.set_default(["epsilon"])
        assert op.get_priority() == ["alpha", "epsilon", "native"]
    assert ran(op) == "epsilon"


def test_a_setting_changed_inside_a_scope_counts_at_once(op: ir.IrOp) -> None:
    with ir.priority(marked=["alpha"]):
        assert ran(op) == "alpha"
        op.registry.settings.require(ir.Source.COMMAND_LINE, ["batch_invariant"], "a test")
        op.register_impl("epsilon", traits={"batch_invariant"})(marked(MARKS["epsilon"]))
        assert ran(op) == "epsilon"
    assert ran(op) == "epsilon"


def test_required_traits_nest_and_admit_only_those_who_have_them(registry: ir.Registry) -> None:
    op = ir.register_op(name="marked", native_traits={"batch_invariant"})(marked(MARKS["native"]))
    op.register_impl("alpha")(marked(MARKS["alpha"]))
    op.register_impl("beta", traits={"differentiable"})(marked(MARKS["beta"]))
    with ir.priority(marked=["alpha", "beta"]):
        assert ran(op) == "alpha"
        with ir.require("differentiable"):
            assert ran(op) == "beta"
            with ir.require("batch_invariant"):
                assert ran(op) == "native"
                required = ir.explain(op, torch.zeros(1)).required
                assert set(required) == {"batch_invariant", "differentiable"}
            assert ran(op) == "beta"
        with ir.require("batch_invariant"), pytest.raises(ProviderUnavailableError):
            op.using("alpha!")(torch.zeros(1))
        assert ran(op) == "alpha"


# Records


def test_a_record_counts_what_ran(op: ir.IrOp) -> None:
    op.register_impl("epsilon", supports_args=ir.rules.ndim("x", 2))(marked(MARKS["epsilon"]))
    with ir.record() as log:
        ran(op)
        with ir.priority(marked=["epsilon", "alpha"]):
            ran(op)
            ran(op)
        op.using("beta")(torch.zeros(1))
    ran(op)
    assert log.selected_impls == {"marked": {"native": 1, "alpha": 2, "beta": 1}}
    (passed_over,) = [e for e, n in log.outcomes() if n == 2]
    assert passed_over.chosen == "alpha"
    verdicts = {v.provider: v for v in passed_over.verdicts}
    assert verdicts["epsilon"].outcome == "rejected"
    assert "1-d" in verdicts["epsilon"].reason
    assert "scope" in verdicts["alpha"].origin


def test_records_nest_and_belong_to_one_thread(op: ir.IrOp) -> None:
    with ir.record() as outer:
        ran(op)
        with ir.record() as inner, ThreadPoolExecutor(1) as pool:
            ran(op)
            pool.submit(ran, op).result()
    assert outer.selected_impls == {"marked": {"native": 2}}
    assert inner.selected_impls == {"marked": {"native": 1}}


def test_a_record_sees_inside_composites() -> None:
    args = ir.ops.fused_add_rms_norm.generate_inputs()
    with ir.record() as log, ir.priority(fused_add_rms_norm=["native"], rms_norm=["native"]):
        ir.ops.fused_add_rms_norm(*args)
    assert log.selected_impls == {"fused_add_rms_norm": {"native": 1}, "rms_norm": {"native": 1}}


def test_a_record_changes_no_value_and_no_error(op: ir.IrOp) -> None:
    def refuses(x: Tensor) -> bool:
        return False

    op.register_impl("epsilon", supports_args=refuses)(marked(0))
    with ir.record() as log:
        assert ran(op) == "native"
        with pytest.raises(ir.IrError, match="epsilon"):
            op.using("epsilon!")(torch.zeros(1))
    assert log.selected_impls == {"marked": {"native": 1}}


def test_a_record_leaves_tracing_and_gradients_alone(op: ir.IrOp) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def count(graph: torch.fx.Graph) -> int:
        return sum(node.target is op.torch_op for node in graph.nodes)

    with ir.record():
        assert count(make_fx(op)(torch.zeros(1)).graph) == 1
        assert count(torch.fx.symbolic_trace(lambda x: op(x) + 0).graph) == 1
        y = op(torch.zeros(1, requires_grad=True))
        assert y.requires_grad
        assert torch.equal(torch.vmap(op)(torch.zeros(3, 2)), torch.full((3, 2), 64.0))


# First use

FIRST_USE = """
    import threading

    found, errors = {}, []
    barrier = threading.Barrier(16)

    def work(i):
        name = ["aten", "batch_invariant", "native", None][i % 4]
        x = torch.ones(2, 8)
        barrier.wait()
        try:
            if name is None:
                with torch.no_grad():
                    ir.ops.rms_norm(x, None, 1e-6)
                found[i] = ir.ops.rms_norm.dispatch(x, None, 1e-6).provider
                return
            with ir.priority(rms_norm=[name]), ir.record() as log:
                ir.ops.rms_norm(x, None, 1e-6)
            (found[i],) = log.selected_impls["rms_norm"]
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors, errors
    cycle = ["aten", "batch_invariant", "native", "batch_invariant"]
    expected = {i: cycle[i % 4] for i in range(16)}
    assert found == expected, found
"""


def test_first_use_from_many_threads_at_once(fresh_cases: FreshCases) -> None:
    env = {"OPWEAVE_IR_OP_PRIORITY__RMS_NORM": "batch_invariant"}
    fresh_cases([Case(FIRST_USE, env)] * 2)


FIRST = [
    "with ir.priority(rms_norm=['aten']): f()",
    "ir.ops.rms_norm.using('aten!')(x, None, 1e-6)",
    "ir.ops.rms_norm.set_default(['aten'])",
    "ir.ops.rms_norm.dispatch(x, None, 1e-6)",
    "ir.ops.rms_norm.supported_providers()",
    "torch.compile(f, backend='eager', fullgraph=True)()",
    "from torch._subclasses.fake_tensor import FakeTensorMode as Fakes\n"  # noqa: ISC004
    "with Fakes(allow_non_fake_inputs=True): f()",
    "with torch.inference_mode(): f()",
    "with torch.device('meta'): f()",
    "torch.vmap(lambda x: ir.ops.rms_norm(x, None, 1e-6))(x)",
    "with ir.isolated_registry(): f()",
    "torch.ops.opweave.rms_norm(x, None, 1e-6)",
    "ir.ops.fused_add_rms_norm.maybe_inplace(x, x.clone(), None, 1e-6)",
]


def test_whatever_comes_first_the_settings_are_read(fresh_cases: FreshCases) -> None:
    code = """
x = torch.ones(2, 8)
def f(): return ir.ops.rms_norm(x, None, 1e-6)
{first}
assert ir.ops.rms_norm.get_priority()[0] == 'batch_invariant', ir.ops.rms_norm.get_priority()
assert 'aten' in ir.ops.causal_attention.get_priority()
"""
    env = {"OPWEAVE_IR_OP_PRIORITY__RMS_NORM": "batch_invariant"}
    fresh_cases([Case(code.format(first=first), env) for first in FIRST])

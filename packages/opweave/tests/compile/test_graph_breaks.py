"""Calls that Dynamo leaves to Python while it is active: after a graph break, or where it skips."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from opweave import ir

X, W = torch.randn(4, 8), torch.randn(8, 8)
BATCH_INVARIANT = {"linear": ["batch_invariant"], "rms_norm": ["batch_invariant", "native"]}


def op_calls(x: Tensor, w: Tensor) -> Tensor:
    with ir.priority(BATCH_INVARIANT):
        return ir.ops.rms_norm(ir.ops.linear(x, w), None, 1e-6)


def scope_in_the_function(x: Tensor, w: Tensor) -> Tensor:
    with ir.priority(BATCH_INVARIANT):
        return ir.ops.rms_norm(ir.ops.linear(x * 2, w), None, 1e-6)


def explicit_graph_break(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return op_calls(y, w)


def nested_disable(x: Tensor, w: Tensor) -> Tensor:
    return disabled(x * 2, w) + 0


def enabled_again(x: Tensor, w: Tensor) -> Tensor:
    return outer_disabled(x * 2, w) + 0


def generator(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat(list(yielding(x * 2, w)))


def thread(x: Tensor, w: Tensor) -> Tensor:
    found: list[Tensor] = []

    def run() -> None:
        with torch.no_grad():
            found.append(op_calls(x * 2, w))

    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    return found[0]


disabled = torch.compiler.disable(op_calls)


@torch.compiler.disable(recursive=False)
def outer_disabled(x: Tensor, w: Tensor) -> Tensor:
    return op_calls(x, w)


def yielding(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    with ir.priority(BATCH_INVARIANT):
        for part in x.split(2):
            yield ir.ops.rms_norm(ir.ops.linear(part, w), None, 1e-6)


PROGRAMS = [
    scope_in_the_function,
    explicit_graph_break,
    nested_disable,
    enabled_again,
    generator,
    thread,
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("backend", ["eager", "opweave"])
def test_the_selected_kernel_runs(
    program: Callable[[Tensor, Tensor], Tensor], backend: str
) -> None:
    expected = ir.ops.rms_norm.impls["batch_invariant"].impl_fn(
        ir.ops.linear.impls["batch_invariant"].impl_fn(X * 2, W), None, 1e-6
    )
    options = {"codegen": False} if backend == "opweave" else None
    with warnings.catch_warnings(record=True) as warned:  # where Dynamo looks inside an op
        warnings.simplefilter("always")
        found = torch.compile(program, backend=backend, options=options)(X, W)
    assert torch.equal(found, expected)
    assert not [w for w in warned if "opweave" in str(w.message)]


def in_priority(x: Tensor) -> Tensor:
    with ir.priority(BATCH_INVARIANT):
        return ir.ops.rms_norm(x * 2, None, 1e-6)


def in_set_priority(x: Tensor) -> Tensor:
    with ir.ops.rms_norm.set_priority(["batch_invariant"]):
        return ir.ops.rms_norm(x * 2, None, 1e-6)


def in_require(x: Tensor) -> Tensor:
    with ir.require("batch_invariant"), ir.priority(BATCH_INVARIANT):
        return ir.ops.rms_norm(x * 2, None, 1e-6)


def in_record(x: Tensor) -> Tensor:
    with ir.record() as record, ir.priority(BATCH_INVARIANT):
        result = ir.ops.rms_norm(x * 2, None, 1e-6)
    assert record.selected_impls == {"rms_norm": {"batch_invariant": 1}}
    return result


SCOPES = [in_priority, in_set_priority, in_require, in_record]


@pytest.mark.parametrize("program", SCOPES)
def test_a_scope_inside_a_compiled_function(program: Callable[[Tensor], Tensor]) -> None:
    name = program.__name__.removeprefix("in_")
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        torch.compile(program, backend="eager", fullgraph=True)(X)
    assert f".{name} cannot be traced inside a compiled function" in str(error.value)
    torch.compiler.reset()
    expected = ir.ops.rms_norm.impls["batch_invariant"].impl_fn(X * 2, None, 1e-6)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert torch.equal(torch.compile(program, backend="eager")(X), expected)
    assert not warned


def test_an_op_is_first_used_after_a_graph_break(fresh_python: Any) -> None:
    done = fresh_python("""
        import torch
        from opweave import ir

        def program(x):
            with ir.priority(rms_norm=["native"]):
                return ir.ops.rms_norm(x, None, 1e-6)

        with torch.no_grad():
            x = torch.randn(4, 8)
            found = torch.compile(program, backend="eager")(x)
            torch.testing.assert_close(found, program(x))
    """)
    assert done.stderr == ""


def opaque_implementations() -> list[Any]:
    return [
        pytest.param(op, impl, id=f"{op.name}-{impl.provider}")
        for op in ir.current_registry().ops.values()
        for impl in op.impls.values()
        if impl.supported and hasattr(impl.impl_fn, "__wrapped__") and op.has_input_generator
    ]


@pytest.mark.parametrize(("op", "impl"), opaque_implementations())
def test_dynamo_traces_a_call_of_an_opaque_implementation(op: ir.IrOp, impl: ir.IrOpImpl) -> None:
    values = op.bind(*op.generate_inputs())
    if impl.rejection(values):
        pytest.skip("the implementation does not accept the generated inputs")
    args, kwargs = op.schema.split(values)
    expected = impl.impl_fn(*cloned(args), **cloned(kwargs))
    compiled = torch.compile(impl.impl_fn, backend="eager")
    torch.testing.assert_close(compiled(*args, **kwargs), expected, atol=0, rtol=0)


def cloned(values: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, values)

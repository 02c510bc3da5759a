"""Compiled calls: one graph for any number of tokens, and torch's opcheck."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opweave import torch_compat
from opweave.conformance import inputs
from opweave.conformance.compare import outputs_problem
from opweave.conformance.inputs import Tokens, tokens_of
from opweave.conformance.snapshot import Values, copied
from opweave.conformance.subject import Case, Check, Finding, Findings, Subject, accepted, each

# opcheck: ``torch.library.opcheck`` with this implementation.


_OPCHECK_TESTS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def _compilable(subject: Subject, count: int = 1) -> list[Case]:
    """Return those of the first *count* usual cases that the predicate accepts in a graph."""
    return [c for c in list(inputs.usual(subject))[:count] if subject.compiles(c.values)]


def _passes(subject: Subject, case: Case) -> Finding:
    torch_op: Any = subject.op.torch_op
    args, kwargs = subject.op.schema.split(copied(case.values))
    with subject.op.set_priority([f"{subject.provider}!"]), torch.no_grad():
        results = torch.library.opcheck(
            torch_op, args, kwargs, test_utils=_OPCHECK_TESTS, raise_exception=False
        )
    failed = [f"{test}: {error}" for test, error in results.items() if error != "SUCCESS"]
    return " ".join(" ".join(failed).split())[:300] if failed else None


OPCHECK = Check(
    "opcheck", "torch.library.opcheck passes", each(partial(_compilable, count=2), _passes)
)


# Compiled calls: the eager result, in one graph for any number of tokens.


_TOKEN_COUNTS = (5, 8, 13, 64, 257)
_MAX_GRAPHS = 2  # one for few tokens and one for many


def _as_eager(subject: Subject, case: Case) -> Finding:
    ways = [subject.run]
    if subject.op.allow_inplace:
        ways.append(subject.run_donating)
    for run in ways:
        torch.compiler.reset()
        compiled = torch.compile(_of_tensors(run, case.values), backend="opweave", fullgraph=True)
        problem = outputs_problem(case, compiled(*_tensors(copied(case.values))))
        if problem:
            return f"compiled{', donating' if run == subject.run_donating else ''}: {problem}"
    return None


def _of_any_size(subject: Subject) -> Findings:
    tokens = tokens_of(subject)
    if not isinstance(tokens, Tokens) or not subject.compiles(tokens.case.values):
        return
    torch.compiler.reset()
    graphs: list[int] = []
    backend = partial(_counting, graphs)
    compiled: Callable[..., Any] | None = None
    for count in _TOKEN_COUNTS:
        case = inputs.generated(subject, num_tokens=count)
        if case is None:
            continue
        if compiled is None:
            function = _of_tensors(subject.run, case.values)
            compiled = torch.compile(function, backend=backend, fullgraph=True)
        yield from accepted(subject, case, partial(_right, tokens, compiled))
    if len(graphs) > _MAX_GRAPHS:
        yield f"{len(graphs)} graphs for {len(_TOKEN_COUNTS)} numbers of tokens: it recompiles"


def _right(tokens: Tokens, compiled: Callable[..., Any], subject: Subject, case: Case) -> Finding:
    values = copied(case.values)
    for value, axis in zip(values, tokens.inputs, strict=True):
        if axis is not None:
            torch_compat.maybe_mark_dynamic(value, axis)
    return outputs_problem(case, compiled(*_tensors(values)))


def _counting(graphs: list[int], module: Any, example: Any) -> Any:
    graphs.append(1)
    # All passes run, but no code is generated: only the number of graphs matters.
    backend: Any = torch_compat.lookup_backend("opweave")
    return backend(module, example, options={"codegen": False})


def _tensors(values: Values) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _of_tensors(run: Callable[[Values], Any], values: Values) -> Callable[..., Any]:
    """Return *run* as a function of the tensors in *values*, with its other values fixed."""

    def function(*tensors: Tensor) -> Any:
        remaining = iter(tensors)
        return run(tuple(next(remaining) if isinstance(v, Tensor) else v for v in values))

    return function


COMPILED = Check("compiled", "a compiled call gives the eager result", each(_compilable, _as_eager))
DYNAMIC = Check("dynamic_shapes", "one graph works for any number of tokens", _of_any_size)

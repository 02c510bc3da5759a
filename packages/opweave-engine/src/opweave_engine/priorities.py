"""Priorities that hold for one engine's forwards and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, copy_context

from opweave import ir
from opweave.config import EngineConfig
from opweave_engine.errors import InvalidArgumentError

PriorityLists = Mapping[str, str | Iterable[str]]


def engine_priorities(given: PriorityLists | None, config: EngineConfig) -> ir.IrOpPriorityConfig:
    """Merge the ``ir_op_priority`` argument of an engine with the priorities in its configuration.

    Raises:
        InvalidArgumentError: an op has a list in both.
        IrError: an op or provider, here or in any setting of the process, is unknown; or a list is
            malformed.
    """
    direct = ir.IrOpPriorityConfig(given)
    configured = ir.IrOpPriorityConfig(config.kernel_config.ir_op_priority)
    twice = sorted(direct.keys() & configured.keys())
    if twice:
        raise InvalidArgumentError(
            f"The priority of {', '.join(map(repr, twice))} is given twice: in ir_op_priority and "
            "in config.kernel_config. Give it once."
        )
    ir.current_registry().check_settings()
    merged = ir.IrOpPriorityConfig({**direct, **configured})
    with ir.priority(merged):  # checks the names
        return merged


@contextmanager
def private_context(priorities: PriorityLists) -> Iterator[Context]:
    """Yield a context for forward passes with *priorities*; the caller's context is unchanged.

    Use one context for many forward passes, because selection is prepared once per scope.
    """
    context = copy_context()
    if not priorities:
        yield context
        return
    scope = ir.priority(priorities)
    context.run(scope.__enter__)
    try:
        yield context
    finally:
        context.run(scope.__exit__, None, None, None)

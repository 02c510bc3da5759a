"""Run recorded calls with one provider: is the result right, and is it faster than the default?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from opweave.base.errors import described
from opweave.conformance.case import Case
from opweave.conformance.compare import outputs_problem
from opweave.conformance.memory import Values, copied
from opweave.conformance.subject import Subject
from opweave.ir import IrOp, IrOpImpl
from opweave.ir.codegen import functional
from opweave.platforms import current_platform
from opweave.tuning.timing import Effort, Time, compare
from opweave.tuning.trace import Trace, TracedCall

FAILURES = (Exception, SystemExit)


@dataclass(frozen=True)
class Replay:
    """The result of replaying a call.

    Attributes:
        call: the recorded call.
        provider: the provider that ran.
        default: the provider that the call selects by default.
        status: ``passed``, ``failed`` (wrong result), or ``rejected`` (it does not support the
            call).
        reason: why it failed or was rejected.
        time: the time of the provider, if its result is right.
        default_time: the time of the default.
    """

    call: TracedCall
    provider: str
    default: str
    status: str
    reason: str = ""
    time: Time | None = None
    default_time: Time | None = None


def replay(
    trace: Trace,
    call: TracedCall,
    provider: str | None = None,
    *,
    effort: Effort | None = None,
    seed: int = 0,
) -> Replay:
    """Replay one call of *trace*.

    Args:
        trace: the trace.
        call: the call.
        provider: the provider to run; by default the one that the call selects.
        effort: how thoroughly to measure.
        seed: the seed of random arguments.

    Raises:
        UnknownOpError: the op is not declared.
        TraceError: the call does not fit its op.
    """
    op = trace.op(call)
    values = trace.values(call, seed)
    case = Case(op, call.label, values)
    if case.refusal is not None:
        reason = f"native raises {described(case.refusal, 1)}"
        return Replay(call, provider or "native", "native", "rejected", reason)
    default = op.dispatch(*op.schema.split(values)[0], **op.schema.split(values)[1]).provider
    provider = provider or default
    reason = refusal(op, provider, values)
    if reason:
        return Replay(call, provider, default, "rejected", reason)
    problem = wrong(case, provider)
    if problem:
        return Replay(call, provider, default, "failed", problem)
    calls = {
        name: timed_call(op.impls[name], values) for name in dict.fromkeys((provider, default))
    }
    times = compare(calls, effort)
    return Replay(
        call, provider, default, "passed", time=times[provider], default_time=times[default]
    )


def refusal(op: IrOp, provider: str, values: Values) -> str:
    """Return why an implementation does not support a call, or an empty string."""
    if provider not in op.impls:
        return f"{op.name} has no implementation from {provider}"
    impl = op.impls[provider]
    if not impl.supported:
        return impl.unsupported_reason
    try:
        return impl.rejection(values) or ""
    except FAILURES as error:
        return f"its predicate raised {described(error, 1)}"


def wrong(case: Case, provider: str) -> str:
    """Return what is wrong with an implementation's result, or an empty string."""
    try:
        result = Subject(case.op, provider, current_platform.device_type).run(copied(case.values))
        return outputs_problem(case, result) or ""
    except FAILURES as error:
        return f"raised {described(error, 1)}"


def timed_call(impl: IrOpImpl, values: Values) -> Callable[[], object]:
    """Return a call of the kernel alone, on arguments of its own.

    An in-place kernel writes to its activations, as after ``maybe_inplace``. Those with integer
    activations get a copy each time: running such a kernel repeatedly would advance its input.
    """
    args, kwargs = impl.op.schema.split(copied(values))
    advances = impl.inplace and not all(
        values[i].is_floating_point() for i in impl.op.activation_indices
    )
    return partial(functional(impl) if advances else impl.impl_fn, *args, **kwargs)

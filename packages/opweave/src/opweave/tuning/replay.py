"""Run recorded calls with one provider: is the result right, and is it faster than the default?"""

from __future__ import annotations

from dataclasses import dataclass

from opweave.base.errors import described
from opweave.tuning.contest import default_provider, timed_call, verified
from opweave.tuning.timing import Effort, Time, compare
from opweave.tuning.trace import Trace, TracedCall


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
    from opweave.conformance.case import Case  # imports the conformance kit

    op = trace.op(call)
    values = trace.values(call, seed)
    case = Case(op, call.label, values)
    if case.refusal is not None:
        reason = f"native raises {described(case.refusal, 1)}"
        return Replay(call, provider or "native", "native", "rejected", reason)
    default = default_provider(case)
    provider = provider or default
    checked = verified(case, provider)
    if checked.status != "passed":
        return Replay(call, provider, default, checked.status, checked.reason)
    calls = {name: timed_call(op.impls[name], values) for name in (provider, default)}
    times = compare(calls, effort)
    return Replay(
        call, provider, default, "passed", time=times[provider], default_time=times[default]
    )

"""Verify and time every implementation of an op on the same arguments.

The conformance kit is imported when something is verified: reading a tuning file, which programs
do at the first call of an op, does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from opweave.base.errors import described
from opweave.ir import IrOp, IrOpImpl
from opweave.ir.codegen import functional
from opweave.ir.traffic import least_bytes
from opweave.platforms import current_platform
from opweave.tuning.timing import Effort, Time, compare

if TYPE_CHECKING:
    from opweave.conformance.case import Case, Outputs
    from opweave.conformance.memory import Values

FAILURES = (Exception, SystemExit)
"""Exceptions of an implementation, which must not end the program."""


@dataclass(frozen=True)
class Measurement:
    """One implementation on one set of arguments.

    Attributes:
        provider: the provider.
        status: ``passed``, ``failed`` (its result is wrong), or ``rejected`` (it does not support
            the arguments, or cannot run here).
        reason: why it failed or was rejected.
        time: the time of a call, if it passed.
        error: the root-mean-square error of the result over that of the definition in float64.
        bytes: the size of arguments and results; None if a table is read in part.
    """

    provider: str
    status: str
    reason: str = ""
    time: Time | None = None
    error: float | None = None
    bytes: int | None = None

    @property
    def bytes_per_second(self) -> float | None:
        """The bandwidth, counting every argument and result once."""
        if self.bytes is None or self.time is None:
            return None
        return self.bytes / self.time.microseconds * 1e6


def contest(
    case: Case,
    providers: Iterable[str] | None = None,
    effort: Effort | None = None,
    turn: Callable[[str, str], object] = lambda provider, stage: None,
) -> list[Measurement]:
    """Verify implementations on the arguments of *case*, and time the right ones in turns.

    Args:
        case: the op and its arguments; native must accept them.
        providers: the providers; by default all of the op.
        effort: how thoroughly to measure.
        turn: called with the provider and the stage (``verifying`` or ``timing``) before each use
            of an implementation.
    """
    op, found = case.op, dict[str, Measurement]()
    calls: dict[str, Callable[[], object]] = {}
    for provider in op.impls if providers is None else providers:
        turn(provider, "verifying")
        found[provider] = verified(case, provider)
        if found[provider].status == "passed":
            calls[provider] = timed_call(op.impls[provider], case.values)
    times = compare(calls, effort, lambda provider: turn(provider, "timing"))
    return [
        Measurement(m.provider, m.status, m.reason, times.get(m.provider), m.error, m.bytes)
        for m in found.values()
    ]


def verified(case: Case, provider: str) -> Measurement:
    """Return whether an implementation supports the arguments and is right, without its time."""
    from opweave.conformance.case import outputs_of
    from opweave.conformance.compare import outputs_problem
    from opweave.conformance.memory import copied
    from opweave.conformance.subject import Subject

    op = case.op
    reason = refusal(op, provider, case.values)
    if reason:
        return Measurement(provider, "rejected", reason)
    try:
        result = Subject(op, provider, current_platform.device_type).run(copied(case.values))
        problem = outputs_problem(case, result)
        if problem:
            return Measurement(provider, "failed", problem)
        outputs = outputs_of(result)
        error = relative_error(outputs, case.reference)
    except FAILURES as raised:
        return Measurement(provider, "failed", f"raised {described(raised, 1)}")
    moved = least_bytes(op, case.values, outputs)
    return Measurement(provider, "passed", error=error, bytes=moved)


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


def default_provider(case: Case) -> str:
    """Return the provider that a call with the arguments of *case* selects."""
    args, kwargs = case.op.schema.split(case.values)
    return case.op.dispatch(*args, **kwargs).provider


def relative_error(found: Outputs, reference: Outputs) -> float:
    """Return the largest root-mean-square error of an output over that of its reference."""
    return max(map(_relative, found, reference), default=0.0)


def _relative(found: Tensor, reference: Tensor) -> float:
    f, r = found.double(), reference.double()
    usable = f.isfinite() & r.isfinite()
    f, r = f[usable], r[usable]
    size = float(r.square().sum().sqrt())
    error = float((f - r).square().sum().sqrt())
    return error / size if size else error


def timed_call(impl: IrOpImpl, values: Values) -> Callable[[], object]:
    """Return a call of the kernel alone, on arguments of its own.

    An in-place kernel writes to its activations, as after ``maybe_inplace``. Those with integer
    activations get a copy each time: running such a kernel repeatedly would advance its input.
    """
    from opweave.conformance.memory import copied

    args, kwargs = impl.op.schema.split(copied(values))
    advances = impl.inplace and not all(
        values[i].is_floating_point() for i in impl.op.activation_indices
    )
    return partial(functional(impl) if advances else impl.impl_fn, *args, **kwargs)

"""Verify and time implementations of an op in a subprocess, on the same arguments."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from opweave import native, platforms
from opweave.config.child_process import ChildWorker, ending
from opweave.config.environment import TUNING_FILE
from opweave.errors import described
from opweave.ir import IrOp, IrOpImpl
from opweave.ir.codegen import functional
from opweave.ir.op import least_bytes
from opweave.ir.ops.arguments import with_noted_lengths
from opweave.ir.priority import NATIVE, without_values
from opweave.kernels.wrap import Wrapped
from opweave.packages import PROJECT, folders_of, installed_version
from opweave.platforms import resolution
from opweave.platforms.resolution import VARIABLE
from opweave.tuning.timing import Effort, Time, chance, rounds_of, time_of
from opweave.tuning.trace import Trace, TracedCall, WorkerFailedError

if TYPE_CHECKING:
    from opweave.conformance.snapshot import Values
    from opweave.conformance.subject import Case, Outputs, Subject


# Verify and time every implementation of an op on the same arguments.
#
# The conformance kit is imported when something is verified: reading a tuning file, which
# programs do at the first call of an op, does not need it.


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
        time: the time of the kernel alone, if it passed.
        call_time: the time of a call through the op, which also selects the kernel.
        error: the root-mean-square error of the result over that of the definition in float64.
        bytes: the size of arguments and results; None if a table is read in part.
        chance: the probability that it appears faster than the default by chance, see
            :func:`~opweave.tuning.timing.chance`.
        digest: of the implementation, see :func:`digest_of`; only in a :class:`Cell`.
    """

    provider: str
    status: str
    reason: str = ""
    time: Time | None = None
    call_time: Time | None = None
    error: float | None = None
    bytes: int | None = None
    chance: float = 1.0
    digest: str = ""

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
    default: str = NATIVE,
    *,
    with_calls: bool = False,
) -> list[Measurement]:
    """Verify implementations on the arguments of *case*, and time the right ones in turns.

    Args:
        case: the op and its arguments; native must accept them.
        providers: the providers; by default all of the op.
        effort: how thoroughly to measure.
        turn: called with the provider and the stage (``verifying`` or ``timing``) before each use
            of an implementation.
        default: the provider that calls select, and that the others are compared with.
        with_calls: also time calls through the op.
    """
    measurements: dict[str, Measurement] = {}
    calls: dict[str, Callable[[], object]] = {}
    for provider in case.op.impls if providers is None else providers:
        turn(provider, "verifying")
        measurements[provider] = verified(case, provider)
        if measurements[provider].status == "passed":
            calls[provider] = timed_call(case.op.impls[provider], case.values)
            if with_calls:
                op = case.op if provider == default else case.op.using(provider)
                calls[_call_of(provider)] = timed_call(case.op.impls[provider], case.values, op)
    rounds = rounds_of(calls, effort, lambda provider: turn(provider, "timing"))
    return [with_times(m, rounds, default) for m in measurements.values()]


def with_times(m: Measurement, rounds: Mapping[str, list[float]], default: str) -> Measurement:
    """Add the time of an implementation, given the seconds of all in each round."""
    if m.provider not in rounds:
        return m
    own, calls = rounds[m.provider], rounds.get(_call_of(m.provider))
    call_time = time_of(calls) if calls else None
    by_chance = chance(own, rounds.get(default, own))
    return replace(m, time=time_of(own), call_time=call_time, chance=by_chance)


def _call_of(provider: str) -> str:
    """Return the name of the calls through the op that run *provider*."""
    return f"{provider} through the op"


def verified(case: Case, provider: str) -> Measurement:
    """Return whether an implementation supports the arguments and is right, without its time."""
    from opweave.conformance.compare import outputs_problem
    from opweave.conformance.snapshot import copied
    from opweave.conformance.subject import Subject, outputs_of

    op = case.op
    reason = refusal(op, provider, case.values)
    if reason:
        return Measurement(provider, "rejected", reason)
    try:
        result = Subject(op, provider, platforms.current_platform.device_type).run(
            copied(case.values)
        )
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
    args, kwargs = case.op.schema.split(with_noted_lengths(case.op.schema.names, case.values))
    return case.op.dispatch(*args, **kwargs).provider


def relative_error(outputs: Outputs, reference: Outputs) -> float:
    """Return the largest root-mean-square error of an output over that of its reference."""
    return max(map(_relative, outputs, reference), default=0.0)


def _relative(output: Tensor, reference: Tensor) -> float:
    f, r = output.double(), reference.double()
    usable = f.isfinite() & r.isfinite()
    f, r = f[usable], r[usable]
    size = float(r.square().sum().sqrt())
    error = float((f - r).square().sum().sqrt())
    return error / size if size else error


def timed_call(impl: IrOpImpl, values: Values, op: Any = None) -> Callable[[], object]:
    """Return a call of the kernel alone, or through *op*, on arguments of its own.

    An in-place kernel writes to its activations, as after ``maybe_inplace``. Those with integer
    activations get a copy each time: running such a kernel repeatedly would advance its input.
    """
    from opweave.conformance.snapshot import copied

    args, kwargs = impl.op.schema.split(with_noted_lengths(impl.op.schema.names, copied(values)))
    advances = impl.inplace and not all(
        values[i].is_floating_point() for i in impl.op.activation_indices
    )
    if op is not None:
        function = op.maybe_inplace if impl.inplace and not advances else op
    else:
        function = functional(impl) if advances else impl.impl_fn
    return partial(function, *args, **kwargs)


# Cells of a tuning file: one op, one family of calls, one bucket of token counts.


Key = tuple[str, str, int]
_MAX_CHANCE = 0.005  # of a wrong choice in a cell
_STATUSES = ("passed", "failed", "rejected", "crashed")


@dataclass(frozen=True)
class Cell:
    """The measurements of a call.

    Attributes:
        op: the name of the op.
        family: dtypes, fixed sizes and other arguments of the call; ``n`` is the tokens.
        tokens: the number of tokens that was measured.
        calls: the number of calls in the trace.
        default: the provider that the call selects without tuning.
        results: the outcome for each provider; its status may also be ``crashed``.
        busy: that other processes used the machine. Then nothing is chosen.
    """

    op: str
    family: str
    tokens: int
    calls: int
    default: str
    results: tuple[Measurement, ...]
    busy: str = ""

    @property
    def key(self) -> Key:
        """Identifies a cell of a tuning file."""
        return (self.op, self.family, bucket(self.tokens))

    @property
    def best(self) -> str:
        """The fastest provider, if it is faster than the default by more than chance.

        For reports; :mod:`opweave.tuning.choice` chooses per range of numbers of tokens.
        """
        usual = self.time(self.default)
        best, time = self.default, usual
        for m in self.results:
            if (
                m.time is None
                or self.busy
                or (usual is not None and not self.is_faster(m.provider))
            ):
                continue
            if time is None or m.time.microseconds < time.microseconds:
                best, time = m.provider, m.time
        return best

    def is_faster(self, provider: str) -> bool:
        """Whether a provider is faster than the default, and not only by chance.

        The more implementations were timed, the more of them would be faster by chance.
        """
        chances = {m.provider: m.chance for m in self.results if m.time is not None}
        return chances.get(provider, 1.0) * (len(chances) - 1) <= _MAX_CHANCE

    def time(self, provider: str) -> Time | None:
        """Return the time of a provider, if its result is right."""
        return next((m.time for m in self.results if m.provider == provider), None)

    def stale(self, op: IrOp) -> list[str]:
        """Return the providers whose implementation has changed since it was measured."""
        impls = op.impls
        present = [m for m in self.results if m.provider in impls]
        return [m.provider for m in present if m.digest != digest_of(impls[m.provider])]

    def is_current(self, op: IrOp) -> bool:
        """Whether all implementations that can run were measured undisturbed, and are unchanged."""
        measured = {m.provider for m in self.results}
        is_complete = measured.issuperset(op.supported_providers())
        return is_complete and not self.busy and not self.stale(op)

    def to_dict(self) -> dict[str, Any]:
        """Return the cell as plain data."""
        results = []
        for m in self.results:
            result: dict[str, Any] = {"provider": m.provider, "status": m.status}
            result["digest"] = m.digest
            if m.reason:
                result["reason"] = m.reason
            if m.time:
                result["microseconds"] = round(m.time.microseconds, 3)
                result["noise"] = round(m.time.noise, 4)
                result["chance"] = m.chance
            results.append(result)
        return {
            "op": self.op, "family": self.family, "tokens": self.tokens, "calls": self.calls,
            "default": self.default, "best": self.best, "busy": self.busy, "results": results,
        }  # fmt: skip

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Cell:
        """Return the cell in a tuning file; raises KeyError, TypeError or ValueError."""
        tokens, calls = (_checked(data, name, int) for name in ("tokens", "calls"))
        op, family, default = (_checked(data, name, str) for name in ("op", "family", "default"))
        results, busy = tuple(map(_result, data["results"])), str(data.get("busy", ""))
        return cls(op, family, tokens, calls, default, results, busy)


def _result(data: Mapping[str, Any]) -> Measurement:
    provider, status = (_checked(data, name, str) for name in ("provider", "status"))
    if status not in _STATUSES:
        raise ValueError(f"status {status!r} should be one of {', '.join(_STATUSES)}")
    time, chance = None, 1.0
    if "microseconds" in data:
        chance = _checked(data, "chance", int, float)
        time = Time(*(_checked(data, name, int, float) for name in ("microseconds", "noise")))
    reason, digest = (str(data.get(name, "")) for name in ("reason", "digest"))
    return Measurement(provider, status, reason, time, chance=chance, digest=digest)


def _checked(data: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """Return the field *name*, of one of *kinds*; numbers are not negative."""
    value = data[name]
    is_valid = isinstance(value, kinds) and not isinstance(value, bool)
    # A comparison with NaN is false.
    if not is_valid or (isinstance(value, int | float) and not value >= 0):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{name} {value!r:.40} should be {names}, not negative")
    return value


def bucket(tokens: int) -> int:
    """Return the bucket of a number of tokens: the next power of two.

    Examples:
        >>> [bucket(tokens) for tokens in (0, 1, 2, 3, 16, 17)]
        [0, 1, 2, 4, 16, 32]
    """
    return 1 << (tokens - 1).bit_length() if tokens > 0 else 0


def family_of(call: TracedCall) -> str:
    """Return the arguments of a call except for the number of tokens."""
    return ", ".join(f"{name} {_family(a, call.tokens)}" for name, a in call.arguments.items())


def cells_to_measure(trace: Trace, measured: Mapping[Key, Cell]) -> list[TracedCall]:
    """Return the most frequent call of each cell to be measured, most frequent first.

    Ops with a single implementation are left out, and *measured* cells that are current.

    Raises:
        UnknownOpError, TraceError: a call does not fit its op.
    """
    calls: dict[Key, TracedCall] = {}
    for call in trace.calls:
        op, key = trace.op(call), (call.op, family_of(call), bucket(call.tokens))
        is_done = key in measured and measured[key].is_current(op)
        if is_done or len(op.supported_providers()) < 2:
            continue
        if key not in calls or call.count > calls[key].count:
            calls[key] = call
    return sorted(calls.values(), key=lambda call: -call.count)


_SOURCE_SUFFIXES = (".py", ".cpp", ".h", ".cu", ".so", ".pyd")


@cache
def digest_of(impl: IrOpImpl) -> str:
    """Return a digest of the code that an implementation's result and time depend on.

    It covers the source files of the kernel and its predicate, the other files of its package, and
    the versions of the packages that its module uses. opweave and torch are left out, because
    their versions are in :class:`~opweave.tuning.timing.Machine`.
    """
    name = without_values(impl.impl_fn).__module__
    values = list(vars(sys.modules[name]).values()) if name in sys.modules else []
    uses = [v.__name__ for v in values if isinstance(v, ModuleType)]
    uses += [getattr(value, "__module__", "") for value in values]
    wrapped = Wrapped.by(impl)
    uses += [function.name for function in wrapped.named()] if wrapped else []
    own = _top(name)
    packages = {own, *map(_top, uses)} - {*sys.stdlib_module_names, *PROJECT, "torch", ""}
    parts = [impl.uuid(), str(impl.owner), *(_version(p, p == own) for p in sorted(packages))]
    parts += sorted(_hash(v.__file__) for v in values if isinstance(v, native.NativeModule))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _top(name: object) -> str:
    """Return the package in the name of a module or function."""
    return str(name).partition(":")[0].partition(".")[0]


@cache
def _version(package: str, is_own: bool) -> str:
    """Return the version of a package; a digest of its files if it is the kernel's or has none."""
    version = installed_version(package)
    if version is None:  # the distribution may have another name
        others = packages_distributions().get(package, ())
        version = next(filter(None, map(installed_version, others)), None)
    if version is not None and not is_own:
        return f"{package} {version}"
    files = (file for folder in folders_of(package) for file in folder.rglob("*"))
    sources = sorted(file for file in files if file.suffix in _SOURCE_SUFFIXES)
    module_file = getattr(sys.modules.get(package), "__file__", None)
    return " ".join(map(_hash, sources)) if sources else _hash(module_file)


def _hash(path: object) -> str:
    return hashlib.sha256(Path(str(path)).read_bytes()).hexdigest() if path else ""


def _family(argument: Mapping[str, Any], tokens: int) -> str:
    if argument["type"] == "list":
        return f"[{', '.join(_family(item, tokens) for item in argument['items'])}]"
    if "shape" not in argument:
        return repr(argument["value"])
    sizes = list(map(str, argument["shape"]))
    if argument["shape"][:1] == [tokens]:
        sizes[0] = "n"
    strides = "" if _is_contiguous(argument) else f" strides {argument['stride']}"
    return f"{argument['dtype']}[{','.join(sizes)}]{strides}"


def _is_contiguous(tensor: Mapping[str, Any]) -> bool:
    expected = 1
    for size, step in zip(reversed(tensor["shape"]), reversed(tensor["stride"]), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


# Measures calls in a subprocess, so that a crashing or hanging kernel is excluded, not fatal.


@dataclass(frozen=True)
class Task:
    """Settings shared by all calls.

    Attributes:
        modules: modules to import, which register ops and implementations.
        effort: how thoroughly to measure.
        seed: the seed of random arguments.
    """

    modules: tuple[str, ...] = ()
    effort: Effort = field(default_factory=Effort)
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """A call to measure; the only one of its trace.

    Attributes:
        trace: the call and its stored tensors.
        providers: the implementations.
    """

    trace: Trace
    providers: tuple[str, ...]


@dataclass(frozen=True)
class SubjectJob:
    """An implementation to measure next to the definition, on arguments of a usual size.

    Attributes:
        op, providers: their names.
        options: options of the op's input generator, for a kernel that supports some sizes only.
    """

    op: str
    providers: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class TuningStage:
    """Sent before each use of an implementation; the action is ``verifying`` or ``timing``."""

    provider: str
    action: str


@dataclass(frozen=True)
class Done:
    """The result of a job: the default provider, and the measurements or an obstacle."""

    default: str
    measurements: tuple[Measurement, ...]
    obstacle: str = ""


class TuningWorker(ChildWorker):
    """Measures calls one after another in a subprocess.

    Args:
        task: the shared settings.
        timeout: seconds that one step (verifying, or one turn of timing) may take.
    """

    def __init__(self, task: Task, timeout: float = 120.0) -> None:
        super().__init__("opweave.tuning.worker_main", task)
        self._timeout = timeout

    def environment(self) -> Mapping[str, str]:
        # The default is the choice without tuning.
        return {VARIABLE: resolution().to_json(), TUNING_FILE: ""}

    def start_error(self, code: int) -> Exception:
        return WorkerFailedError(
            f"the process that measures ended with {ending(code)} before it began."
        )

    def measure(self, trace: Trace, call: TracedCall) -> Cell | str:
        """Measure every implementation that can run here.

        An implementation that ends or blocks the process gets the status ``crashed``, and the
        others are measured in a new process.

        Returns:
            The cell, or why the call cannot be measured.

        Raises:
            WorkerFailedError: the subprocess does not start.
        """
        providers = tuple(trace.op(call).supported_providers())
        done = self._without_crashes(Job(_only(trace, call), providers))
        if done.obstacle:
            return done.obstacle
        digests = {name: digest_of(impl) for name, impl in trace.op(call).impls.items()}
        results = (replace(m, digest=digests.get(m.provider, "")) for m in done.measurements)
        cell = (call.op, family_of(call), call.tokens, call.count, done.default)
        return Cell(*cell, tuple(results))

    def measure_subject(self, subject: Subject) -> dict[str, Measurement] | str:
        """Measure an implementation and the definition on arguments of a usual size.

        Returns:
            The measurements by provider, or why they are missing.

        Raises:
            WorkerFailedError: the subprocess does not start.
        """
        providers = (NATIVE, subject.provider)
        done = self._without_crashes(SubjectJob(subject.op.name, providers, subject.options))
        return done.obstacle or {m.provider: m for m in done.measurements}

    def _without_crashes(self, job: Job | SubjectJob) -> Done:
        """Run a job; repeat it without the implementations that end the process."""
        crashed: list[Measurement] = []
        while True:
            stage, outcome = self._run(job)
            if isinstance(outcome, Done):
                return replace(outcome, measurements=(*outcome.measurements, *crashed))
            if not stage.provider:
                return Done("", (), f"while building the arguments, the process {outcome}")
            reason = f"{outcome} while {stage.action}"
            crashed.append(Measurement(stage.provider, "crashed", reason))
            job = replace(job, providers=tuple(p for p in job.providers if p != stage.provider))

    def _run(self, job: Job | SubjectJob) -> tuple[TuningStage, Done | str]:
        """Return the last stage, and the result or how the process ended."""
        process, stage = self.running(), TuningStage("", "")
        process.connection.send(job)
        while True:
            try:
                message = process.receive(self._timeout)
            except EOFError:
                return stage, f"ended with {ending(self.end())}"
            except TimeoutError:
                self.end()
                return stage, f"did not respond within {self._timeout:g} s"
            if isinstance(message, Done):
                return stage, message
            stage = message


def _only(trace: Trace, call: TracedCall) -> Trace:
    """Return *trace* with this call alone, and its stored tensors."""
    arguments = list(call.arguments.values())
    arguments += [item for argument in arguments for item in argument.get("items", ())]
    keys = [a["tensor_key"] for a in arguments if a["type"] == "safetensors"]
    return replace(trace, calls=[call], data={key: trace.data[key] for key in keys})


# Run recorded calls with one provider: is the result right, and is it faster than the default?


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
    from opweave.conformance.subject import Case  # imports the conformance kit

    op = trace.op(call)
    values = trace.values(call, seed)
    case = Case(op, call.label, values)
    if case.refusal is not None:
        reason = f"native raises {described(case.refusal, 1)}"
        return Replay(call, provider or "native", "native", "rejected", reason)
    default = default_provider(case)
    provider = provider or default
    measured = {m.provider: m for m in contest(case, dict.fromkeys((provider, default)), effort)}
    m = measured[provider]
    default_time = measured[default].time if m.status == "passed" else None
    return Replay(call, provider, default, m.status, m.reason, m.time, default_time)

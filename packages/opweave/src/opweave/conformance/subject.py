"""Subjects of verification, the cases that they run on, and the errors of the kit."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from opweave import ir
from opweave.ir import IrOp, IrOpImpl
from opweave.ir.calls import Calls, Values, copied, mapped
from opweave.ir.errors import OpweaveError, did_you_mean
from opweave.ir.op import shown, tensors_in
from opweave.ir.priority import NATIVE, Entries, parse
from opweave.ir.scope import Scope, current_scope, entered

# Errors of the conformance kit, one class per condition.


class ConformanceError(OpweaveError):
    """Base class of the errors of the conformance kit."""


class UnknownCheckError(ConformanceError, LookupError):
    """A check does not exist."""


class NothingToVerifyError(ConformanceError, LookupError):
    """No registered implementation matches the given ops, providers and platform."""


class ModuleImportError(ConformanceError, ImportError):
    """A module with implementations cannot be imported."""


class UnknownPlatformError(ConformanceError, LookupError):
    """The platform does not exist, or its device is missing."""


class NonconformingError(ConformanceError, AssertionError):
    """An implementation, layer or platform failed a check."""


class UnknownInputError(ConformanceError, LookupError):
    """An input generator does not have the option, or does not accept its value."""


class VerifierFailedError(ConformanceError, RuntimeError):
    """The process that runs an implementation does not start."""


class KernelEndedError(BaseException):
    """The process of an implementation has ended, or did not return a result in time.

    It is not an Exception: checks report the exceptions of an implementation, and continue.
    """


# The subject of verification: an implementation of an op on a device.


class KernelCalls(Protocol):
    """The process in which an implementation runs."""

    @property
    def pid(self) -> int:
        """The process id."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a method of :class:`opweave.ir.calls.Calls`."""


@dataclass(frozen=True)
class Subject:
    """An implementation of an op, on a device.

    Attributes:
        op: the op.
        provider: the provider of the implementation.
        device: the device type of its arguments.
        options: options of the op's input generator that differ from its defaults.
    """

    op: IrOp
    provider: str
    device: str = "cpu"
    options: tuple[tuple[str, Any], ...] = ()
    process: KernelCalls | None = field(default=None, compare=False, repr=False)
    origin: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.op.name}:{self.provider}"

    @property
    def impl(self) -> IrOpImpl:
        """The implementation."""
        return self.op.impls[self.provider]

    @property
    def is_native(self) -> bool:
        """Whether it is the native implementation."""
        return self.provider == NATIVE

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """The facts of its registration, see :meth:`opweave.ir.calls.Calls.facts`."""
        facts: Mapping[str, Any] = self.ask("facts")
        return facts

    def has(self, trait: str) -> bool:
        """Whether the implementation claims *trait*."""
        return trait in (self.origin or self.facts)["traits"]

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of :class:`opweave.ir.calls.Calls`, in the process of the subject."""
        if self.process is not None:
            return self.process.call(method, *args, **kwargs)
        return getattr(self._calls, method)(*args, **kwargs)

    @cached_property
    def _calls(self) -> Calls:
        return Calls(self.op, self.provider)

    @property
    def resources(self) -> tuple[int, int, int]:
        """The bytes of memory, open files and threads of the process; zeros: unknown."""
        folder = Path("/proc", str(os.getpid() if self.process is None else self.process.pid))
        try:
            pages = (folder / "statm").read_text(encoding="ascii").split()[1]
            files, threads = (len(os.listdir(folder / name)) for name in ("fd", "task"))
        except OSError:
            return 0, 0, 0
        return int(pages) * mmap.PAGESIZE, files, threads

    @property
    def seconds(self) -> float:
        """The processor time of this process and of the one that runs the implementation.

        And a tenth of the real time, for kernels that wait, such as for a device.
        """
        seconds = time.process_time() + time.perf_counter() / 10
        if self.process is not None:
            with suppress(OSError):  # the process has ended
                # The clock of another process, see clock_getcpuclockid(3).
                seconds += time.clock_gettime(~self.process.pid << 3 | 2)
        return seconds

    def accepts(self, values: Values) -> bool:
        """Whether the predicate accepts the arguments (PredicateFailedError if it raises)."""
        return self.ask("rejection", values) is None

    def compiles(self, values: Values) -> bool:
        """Whether the predicate accepts the arguments in a graph, without tensor values."""
        return self.ask("rejection", values, fake=True) is None

    def run(self, values: Values, **how: Any) -> Any:
        """Run the op; *how* is passed to :meth:`opweave.ir.calls.Calls.run`."""
        return self.ask("run", values, **how)


# A case: arguments for an op, the native result, and a reference in float64.


Outputs = tuple[Tensor, ...]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Case:
    """Arguments for *op*; *label* describes how they were generated.

    The *provider*, if given, is the one whose tolerance applies.
    """

    def __init__(
        self, op: IrOp, label: str, values: Sequence[Any], provider: str | None = None
    ) -> None:
        self.op, self.label, self.values, self.provider = op, label, tuple(values), provider

    def __str__(self) -> str:
        arguments = ", ".join(map(shown, self.values))
        return f"{self.op.name}({arguments}) [{self.label}]"

    def with_values(self, label: str, values: Sequence[Any]) -> Case:
        """Return a case of the same op with other arguments."""
        joined = f"{self.label}, {label}" if self.label else label
        return Case(self.op, joined, values, self.provider)

    def replaced(self, label: str, values: Mapping[int, Any]) -> Case:
        """Return a case with other values for the arguments at these positions."""
        return self.with_values(label, [values.get(i, v) for i, v in enumerate(self.values)])

    @cached_property
    def _run(self) -> Outputs | Exception:
        return run_natively(self.op, self.values)

    @property
    def refusal(self) -> Exception | None:
        """The exception of the native implementation, if it rejects the arguments."""
        return self._run if isinstance(self._run, Exception) else None

    @property
    def native(self) -> Outputs:
        """The result of the native implementation."""
        if isinstance(self._run, Exception):
            raise self._run
        return self._run

    @property
    def wide_values(self) -> Values:
        """The arguments in float64."""
        # An argument that is a dtype is that of the result.
        return tuple(
            torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
            for value in mapped(self.values, _widened)
        )

    @cached_property
    def reference(self) -> Outputs:
        """The native result in float64, or the plain native result if float64 fails."""
        outcome = _run_here(self.op, self.wide_values)
        if isinstance(outcome, Exception) or [t.shape for t in outcome] != [
            t.shape for t in self.native
        ]:
            return self.native
        return outcome


def outputs_of(result: Any) -> Outputs:
    """Return the outputs of an op as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def run_natively(op: IrOp, values: Values) -> Outputs | Exception:
    """Return the native result for copies of the arguments, or the exception.

    The CPU runs first: an out-of-range index raises there, but makes CUDA unusable for the whole
    process.
    """
    if any(t.is_cuda for t in tensors_in(values)):
        outcome = _run_here(op, mapped(values, Tensor.cpu))
        if isinstance(outcome, Exception) and not isinstance(outcome, NotImplementedError):
            return outcome
    return _run_here(op, values)


def _run_here(op: IrOp, values: Values) -> Outputs | Exception:
    args, kwargs = op.schema.split(copied(values))
    try:
        with torch.no_grad(), natively(op):
            return outputs_of(op.native(*args, **kwargs))
    except Exception as error:
        return error


@contextmanager
def natively(op: IrOp) -> Iterator[None]:
    """Select native for every op, including the ops that a composite calls."""
    registry = ir.current_registry()
    ops = tuple(registry.ops.values()) if op.registry is registry else ()
    with entered(Scope(current_scope(), priorities=_native_priorities(ops))):
        yield


@lru_cache(maxsize=1)
def _native_priorities(ops: tuple[IrOp, ...]) -> dict[Hashable, Entries]:
    return {op: parse(NATIVE, "opweave verify") for op in ops}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch inside the block, and restore its generators afterwards."""
    # torch.manual_seed formats three stack traces for accelerators that are missing.
    owner = torch if torch.accelerator.is_available() else torch.default_generator
    with torch.random.fork_rng():
        owner.manual_seed(seed)
        yield


def _widened(t: Tensor) -> Tensor:
    return t.to(torch.float64) if t.dtype in _NARROW else t


# Checks and their outcomes.


Finding = str | None  # the problem of a case, or None
Findings = Iterator[Finding]
Examine = Callable[[Subject, Case], Finding]
S = TypeVar("S")  # what a check verifies: an implementation, a platform

FAILURES = (Exception, SystemExit)
"""Exceptions of the code under verification, which must not end the program."""

_MAX_PROBLEMS = 3  # reported per check of an implementation


def not_native(subject: Subject) -> bool:
    """Whether the implementation is not native, so that it can be compared with native."""
    return not subject.is_native


def claims(trait: str) -> Callable[[Subject], bool]:
    """Return a function that returns whether an implementation claims *trait*."""
    return lambda subject: subject.has(trait)


@dataclass(frozen=True)
class Check(Generic[S]):
    """A conformance check of implementations, or of platforms.

    Attributes:
        name: the name in tables and options.
        promise: the property that a passing implementation has, in one line.
        run: yields the problem of each case, or None.
        applies: returns whether the check applies; by default, it always does.
    """

    name: str
    promise: str
    run: Callable[[S], Findings]
    applies: Callable[[S], bool] = lambda subject: True


@dataclass
class Outcome:
    """The outcome of a check.

    Attributes:
        check: its name.
        passed: the number of cases that passed.
        problems: the first few problems of other cases.
        seconds: the duration.
        has_ended: whether a case ended the process of the implementation.
    """

    check: str
    passed: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    has_ended: bool = False

    @property
    def status(self) -> str:
        """``passed``, ``failed``, or ``none`` if there was no case."""
        if self.problems:
            return "failed"
        return "passed" if self.passed else "none"


def raise_if_failed(subject: object, outcomes: Iterable[Outcome]) -> None:
    """Raise NonconformingError with every problem in *outcomes*, if there is one."""
    lines = [f"{o.check}: {problem}" for o in outcomes for problem in o.problems]
    if lines:
        raise NonconformingError("\n".join([f"{subject} fails:", *lines]))


def select(checks: Mapping[str, Check[S]], names: Iterable[str] = ()) -> list[Check[S]]:
    """Return the checks of these *names*, or all, in the order in which they run.

    Raises:
        UnknownCheckError: a check does not exist.
    """
    names = list(names)
    for name in names:
        if name not in checks:
            raise UnknownCheckError(f"unknown check {name!r}. {did_you_mean(name, checks)}")
    return [check for name, check in checks.items() if not names or name in names]


def each(
    cases: Callable[[Subject], Iterable[Case]], examine: Examine
) -> Callable[[Subject], Findings]:
    """Return a check that runs *examine* on every case that native and the predicate accept."""

    def run(subject: Subject) -> Findings:
        for case in cases(subject):
            yield from accepted(subject, case, examine)

    return run


def accepted(subject: Subject, case: Case, examine: Examine) -> Findings:
    """Yield the problems of *case*, if native and the predicate accept it."""
    if case.refusal is not None:
        return
    try:
        if not subject.accepts(case.values):
            return
        problem = examine(subject, case)
    except FAILURES as error:
        problem = raised(error)
    except KernelEndedError as error:
        raise KernelEndedError(f"{error}: {case}") from None
    yield f"{problem}: {case}" if problem else None


def raised(error: BaseException | None) -> str:
    """Return an exception as a phrase."""
    lines = str(error).strip().splitlines()
    return f"raised {type(error).__name__}{f' ({lines[0]})' if lines else ''}"


def outcome_of(name: str, run: Callable[[], Findings], limit: int = _MAX_PROBLEMS) -> Outcome:
    """Run the check called *name*, until *limit* problems are found."""
    outcome, start = Outcome(name), time.perf_counter()
    try:
        for finding in run():
            if finding is None:
                outcome.passed += 1
            else:
                outcome.problems.append(finding)
            if len(outcome.problems) == limit:
                break
    except FAILURES as error:
        outcome.problems.append(raised(error))
    except KernelEndedError as error:
        outcome.problems.append(str(error))
        outcome.has_ended = True
    outcome.seconds = time.perf_counter() - start
    return outcome

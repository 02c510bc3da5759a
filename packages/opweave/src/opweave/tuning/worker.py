"""Measures calls in a subprocess, so that a crashing or hanging kernel is excluded, not fatal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from opweave.config.child_process import ChildWorker, ending
from opweave.config.environment import TUNING_FILE
from opweave.ir.priority import NATIVE
from opweave.platforms import resolution
from opweave.platforms.handover import VARIABLE
from opweave.tuning.cell import Cell, family_of
from opweave.tuning.contest import Measurement
from opweave.tuning.errors import WorkerFailedError
from opweave.tuning.timing import Effort
from opweave.tuning.trace import Trace, TracedCall

if TYPE_CHECKING:
    from opweave.conformance.subject import Subject


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
    """Sent before each use of an implementation."""

    provider: str
    what: str


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
        found = self._without_crashes(
            Job(_only(trace, call), tuple(trace.op(call).supported_providers()))
        )
        if found.obstacle:
            return found.obstacle
        family = family_of(call)
        return Cell(call.op, family, call.tokens, call.count, found.default, found.measurements)

    def measure_subject(self, subject: Subject) -> dict[str, Measurement] | str:
        """Measure an implementation and the definition on arguments of a usual size.

        Returns:
            The measurements by provider, or why they are missing.

        Raises:
            WorkerFailedError: the subprocess does not start.
        """
        providers = (NATIVE, subject.provider)
        found = self._without_crashes(SubjectJob(subject.op.name, providers, subject.options))
        return found.obstacle or {m.provider: m for m in found.measurements}

    def _without_crashes(self, job: Job | SubjectJob) -> Done:
        """Run a job; repeat it without the implementations that end the process."""
        crashed: list[Measurement] = []
        while True:
            stage, outcome = self._run(job)
            if isinstance(outcome, Done):
                return replace(outcome, measurements=(*outcome.measurements, *crashed))
            if not stage.provider:
                return Done("", (), f"while building the arguments, the process {outcome}")
            reason = f"{outcome} while {stage.what}"
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
    data = {
        given["tensor_key"]: trace.data[given["tensor_key"]]
        for argument in call.arguments.values()
        for given in (argument, *argument.get("items", ()))
        if given["type"] == "safetensors"
    }
    return replace(trace, calls=[call], data=data)

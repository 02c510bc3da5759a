"""The main program of the measuring process: ``python -m opweave.tuning.worker_main``.

Its argument is the file descriptor of the socket to the parent process.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from opweave.config.child_process import end_with_parent
from opweave.conformance.find import import_named, subject_named
from opweave.conformance.subject import Case
from opweave.errors import described
from opweave.tuning import measure
from opweave.tuning.cases import for_subject
from opweave.tuning.measure import Done, Job, SubjectJob, Task, TuningStage


def serve(connection: Connection) -> None:
    """Measure calls until the connection is closed."""
    task: Task = connection.recv()
    for module in task.modules:
        import_named("--import", module)
    connection.send(TuningStage("", "ready"))
    while True:
        job: Job | SubjectJob = connection.recv()
        try:
            connection.send(_measured(job, task, connection))
        except Exception as error:  # the arguments cannot be built, or the selection fails
            connection.send(Done("", (), described(error, 1)))


def _measured(job: Job | SubjectJob, task: Task, connection: Connection) -> Done:
    case: Case | None
    if isinstance(job, SubjectJob):
        subject = subject_named(job.op, job.providers[-1])  # imports the provider's module, if any
        case = for_subject(replace(subject, options=job.options))
    else:
        [call] = job.trace.calls
        case = Case(job.trace.op(call), call.label, job.trace.values(call, task.seed))
    if case is None:
        return Done("", (), "it accepts no arguments of a usual size")
    if case.refusal is not None:
        return Done("", (), f"native raises {described(case.refusal, 1)}")
    default = measure.default_provider(case)

    def report(provider: str, action: str) -> None:
        connection.send(TuningStage(provider, action))

    return Done(default, tuple(measure.contest(case, job.providers, task.effort, report, default)))


if __name__ == "__main__":
    end_with_parent()
    with suppress(EOFError, ConnectionError):  # the parent has ended
        serve(Connection(int(sys.argv[1])))

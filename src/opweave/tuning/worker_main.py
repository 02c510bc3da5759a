"""The main program of the measuring process: ``python -m opweave.tuning.worker_main``.

Its argument is the file descriptor of the socket to the parent process.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from opweave.base.errors import described
from opweave.config.child_process import end_with_parent
from opweave.conformance.case import Case
from opweave.conformance.modules import import_named
from opweave.tuning.contest import contest, default_provider
from opweave.tuning.worker import Done, Job, Task, TuningStage


def serve(connection: Connection) -> None:
    """Measure calls until the connection is closed."""
    task: Task = connection.recv()
    for module in task.modules:
        import_named("--import", module)
    connection.send(TuningStage("", "ready"))
    while True:
        job: Job = connection.recv()
        try:
            connection.send(_measured(job, task, connection))
        except Exception as error:  # the arguments cannot be built, or the selection fails
            connection.send(Done("", (), described(error, 1)))


def _measured(job: Job, task: Task, connection: Connection) -> Done:
    [call] = job.trace.calls
    op = job.trace.op(call)
    values = job.trace.values(call, task.seed)
    case = Case(op, call.label, values)
    if case.refusal is not None:
        return Done("", (), f"native raises {described(case.refusal, 1)}")
    default = default_provider(case)
    found = contest(
        case,
        job.providers,
        task.effort,
        lambda provider, what: connection.send(TuningStage(provider, what)),
    )
    return Done(default, tuple(found))


if __name__ == "__main__":
    end_with_parent()
    with suppress(EOFError, ConnectionError):  # the parent has ended
        serve(Connection(int(sys.argv[1])))

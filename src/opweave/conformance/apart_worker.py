"""The program of the process that verifies: ``python -m opweave.conformance.apart_worker``.

Its argument is the number of the socket to the process that started it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from multiprocessing.connection import Connection

from opweave.conformance.apart import Done, Named, Place, Task
from opweave.conformance.find import subjects
from opweave.conformance.heap import leave_to_this_process
from opweave.conformance.modules import import_named
from opweave.conformance.place import told_to
from opweave.conformance.subject import Subject
from opweave.conformance.verify import verify


def serve(connection: Connection) -> None:
    """Verify what comes, until nothing comes any more."""
    task: Task = connection.recv()
    for module in task.modules:
        import_named("--import", module)
    connection.send(Place("ready"))
    while True:
        try:
            named: Named = connection.recv()
        except EOFError:
            return
        with told_to(lambda place: connection.send(Place(place))):
            result = verify(_found(named), task.checks, seed=task.seed, report=connection.send)
        connection.send(Done(result.subject.options, result.obstacle))


def _found(named: Named) -> Subject:
    [subject] = subjects([named.op], [named.provider])
    return replace(subject, device=named.device, options=named.options)


if __name__ == "__main__":
    leave_to_this_process()
    serve(Connection(int(sys.argv[1])))
